"""The rounds that a peer missed are gone through; where nobody kept them, the state is loaded."""

import concurrent.futures

import pytest

from tests.kit.stepping import Positions, Tracker, after, commits, of_one_weight, report
from trahiv_cli.optim import catch_up as catching_up
from trahiv_cli.optim.catch_up import Gathering
from trahiv_cli.optim.history import History


class Behind(Tracker):
    """The reports of one other peer, which is `ahead` rounds further."""

    ahead = 0
    is_behind = property(lambda self: self.history.step < self.ahead)


def behind(*averages, donor="QmB"):
    """A peer whose companion kept rounds that ended with these averages, and the histories they led to."""
    peer, weight = of_one_weight(Behind())
    kept, histories = peer.gradients.kept.setdefault(donor, {}), [History()]
    for number, average in enumerate(averages):
        kept[histories[-1].digest] = commits(average, proof=b"proof %d" % number)
        histories.append(histories[-1].extend(samples=13, proof=b"proof %d" % number))
    peer.tracker.others, peer.tracker.ahead = (report(donor, histories[-1], histories),), len(averages)
    return peer, weight, histories


def test_a_peer_goes_through_rounds_that_it_missed_and_loads_the_state_where_they_are_not_kept(monkeypatch):
    peer, weight, histories = behind(0.25, 0.5)
    loaded = []
    monkeypatch.setattr(peer.catch_up, "load", lambda: loaded.append(peer.history) or True)
    leases = Positions(peer)
    peer.parts.work.announce(range(8))
    peer.train()
    assert weight.tolist() == [-0.75, -0.75] and peer.history == histories[-1] and loaded == []
    assert peer.position.step_taken == -1, "it did not take them itself"
    assert peer.position.method.samples_held == 0 and peer.gradients.claims == []
    assert peer.tracker.companions == {"QmMe", "QmB"}
    assert leases.returned == list(range(8)), "its gradient was of older weights"
    peer.tracker.ahead = 3
    peer.train()
    assert loaded == [histories[-1]] and weight.tolist() == [-0.75, -0.75]


@pytest.mark.parametrize("is_kept", [True, False])
def test_not_everybody_is_asked_for_a_round(is_kept, monkeypatch):
    peer, _, way = behind(0.25, donor="QmZ")
    many = [f"Qm{number}" for number in range(20)]
    peer.tracker.others = tuple(report(name, way[-1], way) for name in many)
    if is_kept:
        peer.gradients.kept = dict.fromkeys(many, peer.gradients.kept["QmZ"])
    assert peer.catch_up.follow() is is_kept
    assert len(peer.gradients.asked) == (1 if is_kept else catching_up.FOLLOWED_AT_MOST)
    endless = concurrent.futures.Future()
    monkeypatch.setattr(peer.gradients, "start_replay", lambda *_: endless, raising=False)
    peer.leaves = True
    assert not peer.catch_up.follow(), "who wants to leave waits for none"


def test_a_peer_that_goes_back_to_most_others_says_so(monkeypatch):
    class Fewer(Tracker):
        target, is_behind = after(2), True

    peer, _ = of_one_weight(Fewer())
    peer.position.enter(after(5))
    monkeypatch.setattr(peer.catch_up, "load", lambda: True)
    peer.train()
    assert peer.codes == ["fork"]


def test_others_are_waited_for_until_they_are_there_or_time_is_over(monkeypatch):
    monkeypatch.setattr(catching_up, "REFRESH_S", 0.01)
    peer, _ = of_one_weight(Tracker([report("QmB", History())]))
    gathering = Gathering(peer.parts)
    assert gathering.gather(2, 10.0) and not gathering.gather(3, 0.05)
    [said] = [event for event in peer.told if "1 more peer(s)" in event.get("what", "")]
    assert said["what"] == "1 more peer(s): 2 of 3 are here (this one, ...QmB)"
    gathering.wait_for(["QmB"], 60.0)
    gathering.wait_for_stragglers(60.0)
    peer.leaves = True
    gathering.wait_for(["QmC"], 60.0)
