"""What a swarm has committed, as a chain of digests."""

import pytest

from trahiv_cli.optim.history import DIGEST_BYTES, History

START = History()


def after(*proofs, samples=8, steps=1):
    history = START
    for proof in proofs:
        history = history.extend(samples=samples, proof=proof, steps=steps)
    return history


def test_equal_pasts_are_equal_and_arrive_and_others_differ_for_ever():
    history = after(b"p").extend(samples=5, proof=b"q", steps=3)
    assert (history.step, history.samples, len(history.digest)) == (4, 13, DIGEST_BYTES)
    assert History.from_wire(after(b"p", b"q").to_wire()) == after(b"p", b"q")
    pasts = [after(*proofs) for proofs in ([b"p", b"q"], [b"q", b"p"], [b"p", b"r"], [b"r", b"q"], [b"pq"])]
    pasts += [after(b"p"), after(b"p", samples=9), after(b"p", steps=2)]
    for _ in range(20):
        assert len({past.digest for past in pasts}) == len(pasts)
        pasts = [past.extend(samples=8, proof=b"same") for past in pasts]


def test_rank_grows_along_a_history_and_with_samples_rather_than_steps():
    cut = after(b"p")
    small = cut.extend(samples=30, proof=b"s").extend(samples=30, proof=b"s")
    assert START.rank < cut.rank < small.rank < cut.extend(samples=100, proof=b"l").rank
    assert after(b"q").rank != cut.rank, "equal samples are ordered alike by everybody"


DIGEST = bytes(DIGEST_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        *([1, 8], [-1, 8, DIGEST], [1, -8, DIGEST], [1.0, 8, DIGEST], [1, 8, DIGEST + b"x"]),
        *([1, 8, "0" * DIGEST_BYTES], [1, 8, DIGEST, 0]),
    ],
)
def test_what_is_not_a_history_is_refused(data):
    with pytest.raises(ValueError, match="not a history"):
        History.from_wire(data)
