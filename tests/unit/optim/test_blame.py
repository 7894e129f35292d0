"""Of whom rounds fail, and for how long nobody is with it in a group."""

from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from trahiv_cli.optim import blame as blaming
from trahiv_cli.optim.ballot import Vote
from trahiv_cli.optim.blame import MOST_EXCLUDED_S, SUSPECT_S, Blame

PEERS = {name: PeerID(b"peer %s" % name.encode()) for name in "ABCL"}


@pytest.fixture
def blame(monkeypatch, clock):
    monkeypatch.setattr(blaming, "time", SimpleNamespace(monotonic=clock))
    return Blame(PeerID.to_bytes)


def note(blame, is_committed=False, **blames):
    """A round of all: `A="L"` is sure that it failed of L, `A="L?"` may be mistaken."""
    votes = {peer.to_base58(): Vote(b"" if name in blames else b"average") for name, peer in PEERS.items()}
    for name, blamed in blames.items():
        whom = PEERS[blamed[0]].to_base58()
        votes[PEERS[name].to_base58()] = Vote(blames=whom, is_sure=not blamed.endswith("?"))
    blame.note_votes(tuple(PEERS.values()), votes, is_committed)


def excluded(blame):
    return "".join(name for name, peer in PEERS.items() if blame.is_excluded(peer))


@pytest.mark.parametrize(
    ("rounds", "whom"),
    [
        ([{"A": "L", "B": "L", "C": "L"}] * 2, "L"),
        ([{"A": "L", "B": "L", "L": "B"}] * 2, "L"),
        ([{"A": "L", "B": "A?", "C": "A?", "L": "A?"}] * 2, "L"),  # A was the first to see it
        ([{"A": "L?", "B": "A?", "C": "L?"}] * 2, "L"),  # it ended its streams too early
        ([{"L": "A"}, {"L": "B"}, {"L": "C"}], "L"),  # it blames one after the other
        ([{"A": "B", "B": "A"}] * 2, "B"),  # they do not reach each other: the later in order
    ],
)
def test_who_is_blamed_or_blames_most_is_let_into_no_group(blame, rounds, whom):
    for blames in rounds:
        assert excluded(blame) == ""
        note(blame, **blames)
    assert excluded(blame) == whom


def test_each_time_it_is_for_twice_as_long_and_good_rounds_make_up_for_one(blame, clock):
    def excluded_for():
        for _ in range(2):
            note(blame, A="L", B="L")
        left = blame.excluded_until[PEERS["L"]] - clock.now
        clock.now += left
        return left

    assert [excluded_for() for _ in range(3)] == [SUSPECT_S * times for times in (1, 2, 4)]
    note(blame, A="L", B="L")
    for _ in range(4):
        note(blame, is_committed=True)
    note(blame, A="L", B="L")
    assert excluded(blame) == "", "good rounds make up for one that failed"
    note(blame, A="L", B="L")
    assert blame.excluded_until[PEERS["L"]] - clock.now == 4 * SUSPECT_S
    clock.now += 4 * SUSPECT_S
    assert max(excluded_for() for _ in range(8)) == MOST_EXCLUDED_S


def test_nobody_is_excluded_if_no_more_than_half_are_left(blame):
    blame.exclude(PEERS["A"], "it lies")
    for _ in range(4):
        note(blame, B="L", C="L")
    assert excluded(blame) == "A"
