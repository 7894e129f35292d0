"""What a swarm has committed, as a chain of digests."""

import pytest

from trahiv_cli.optim.history import DIGEST_BYTES, History

START = History()


def steps(*proofs, samples=8):
    history = START
    for proof in proofs:
        history = history.extend(samples=samples, proof=proof)
    return history


def test_a_step_counts_itself_and_its_samples():
    history = START.extend(samples=8, proof=b"p").extend(samples=5, proof=b"q")
    assert (history.step, history.samples, len(history.digest)) == (2, 13, DIGEST_BYTES)


def test_equal_pasts_are_equal():
    assert steps(b"p", b"q") == steps(b"p", b"q")
    assert len({steps(b"p", b"q"), steps(b"p", b"q")}) == 1


@pytest.mark.parametrize(
    "other",
    [steps(b"q", b"p"), steps(b"p", b"r"), steps(b"r", b"q"), steps(b"pq"), steps(b"p", b"q", samples=9)],
    ids=["order", "last proof", "first proof", "one step", "samples"],
)
def test_other_pasts_have_other_digests(other):
    assert other.digest != steps(b"p", b"q").digest


def test_a_history_keeps_a_difference_for_ever():
    left, right = steps(b"p"), steps(b"q")
    for _ in range(20):
        left, right = (one.extend(samples=8, proof=b"same") for one in (left, right))
        assert left.digest != right.digest


def test_rank_grows_along_a_history():
    ranks = [START.rank]
    history = START
    for samples in (1, 8, 3):
        history = history.extend(samples=samples, proof=b"p")
        ranks.append(history.rank)
    assert ranks == sorted(set(ranks))


def test_the_half_with_more_samples_has_the_greater_rank_though_it_made_fewer_steps():
    cut = steps(b"p")
    large = cut.extend(samples=100, proof=b"l")
    small = cut.extend(samples=30, proof=b"s").extend(samples=30, proof=b"s")
    assert large.rank > small.rank


def test_equal_samples_are_ordered_alike_by_everybody():
    left, right = steps(b"p"), steps(b"q")
    assert max((left, right), key=lambda h: h.rank) is max((right, left), key=lambda h: h.rank)


@pytest.mark.parametrize("history", [START, steps(b"p", b"q")])
def test_a_history_arrives_as_it_was_sent(history):
    assert History.from_wire(history.to_wire()) == history


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"digest",
        [],
        [1, 8],
        [-1, 8, bytes(DIGEST_BYTES)],
        [1, -8, bytes(DIGEST_BYTES)],
        [1.0, 8, bytes(DIGEST_BYTES)],
        [1, 8.0, bytes(DIGEST_BYTES)],
        [1, 8, b""],
        [1, 8, bytes(DIGEST_BYTES + 1)],
        [1, 8, "0" * DIGEST_BYTES],
        [1, 8, bytes(DIGEST_BYTES), 0],
        {"step": 1},
    ],
)
def test_what_is_not_a_history_is_refused(data):
    with pytest.raises(ValueError, match="not a history"):
        History.from_wire(data)
