"""What a swarm has committed, as a chain of digests."""

import pytest

from trahiv_cli.optim.history import DIGEST_BYTES, History

START = History()


def steps(*proofs, samples=8):
    history = START
    for proof in proofs:
        history = history.extend(samples=samples, proof=proof)
    return history


def test_equal_pasts_are_equal_and_others_differ_for_ever():
    history = START.extend(samples=8, proof=b"p").extend(samples=5, proof=b"q", steps=3)
    assert (history.step, history.samples, len(history.digest)) == (4, 13, DIGEST_BYTES)
    assert steps(b"p", b"q") == steps(b"p", b"q")
    for proofs in ([b"q", b"p"], [b"p", b"r"], [b"r", b"q"], [b"pq"]):
        assert steps(*proofs).digest != steps(b"p", b"q").digest
    assert steps(b"p", samples=9).digest != steps(b"p").digest
    assert START.extend(samples=8, proof=b"p", steps=2).digest != steps(b"p").digest
    left, right = steps(b"p"), steps(b"q")
    for _ in range(20):
        left, right = (one.extend(samples=8, proof=b"same") for one in (left, right))
        assert left.digest != right.digest


def test_rank_grows_along_a_history_and_with_samples_rather_than_steps():
    assert START.rank < steps(b"p").rank < steps(b"p", b"q").rank
    cut = steps(b"p")
    small = cut.extend(samples=30, proof=b"s").extend(samples=30, proof=b"s")
    assert cut.extend(samples=100, proof=b"l").rank > small.rank
    left, right = steps(b"p"), steps(b"q")
    assert left.rank != right.rank, "equal samples are ordered alike by everybody"


def test_a_history_arrives_as_it_was_sent():
    for history in (START, steps(b"p", b"q")):
        assert History.from_wire(history.to_wire()) == history


@pytest.mark.parametrize(
    "data",
    [
        None,
        [1, 8],
        [-1, 8, bytes(DIGEST_BYTES)],
        [1, -8, bytes(DIGEST_BYTES)],
        [1.0, 8, bytes(DIGEST_BYTES)],
        [1, 8, bytes(DIGEST_BYTES + 1)],
        [1, 8, "0" * DIGEST_BYTES],
        [1, 8, bytes(DIGEST_BYTES), 0],
    ],
)
def test_what_is_not_a_history_is_refused(data):
    with pytest.raises(ValueError, match="not a history"):
        History.from_wire(data)
