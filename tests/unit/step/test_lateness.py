"""When a peer is too slow for the swarm's steps, and how it reacts: smaller batches, pauses, warnings."""

import math

import pytest

from trahiv_cli.step.lateness import ENOUGH_IN_TIME, FIRST_PAUSE_S, Lateness, Moment
from trahiv_cli.telemetry.events import Events


@pytest.fixture
def told():
    return []


@pytest.fixture
def lateness(told):
    return Lateness(Events(told.append))


class Swarm:
    """The end of a peer's last batch, with the swarm's step then."""

    now = Moment(1000.0, 0)

    def go_on(self, seconds, steps):
        self.now = Moment(self.now.at + seconds, self.now.step + steps)


@pytest.fixture
def swarm():
    return Swarm()


@pytest.fixture
def late(lateness, swarm):
    def note(samples=8, times=2, seconds=6.0, usual_s=6.0, missed=5):
        for _ in range(times):
            began = swarm.now
            swarm.go_on(seconds, missed)
            lateness.note_late(samples, usual_s, began, swarm.now)

    return note


@pytest.fixture
def in_time(lateness, swarm):
    def note(times=1, seconds=6.0, steps=1):
        for _ in range(times):
            lateness.note_in_time(swarm.now)
            swarm.go_on(seconds, steps)

    return note


def codes(told):
    return [event["code"] for event in told]


def test_two_late_batches_shrink_next(lateness, late, in_time, told):
    late(times=1)
    assert lateness.samples_in_time == math.inf
    assert not told
    in_time(seconds=0.0, steps=0)
    late(times=1, missed=1)
    assert lateness.samples_in_time == 1
    assert codes(told) == ["slow"]
    assert "8 sample(s) takes 6.0 s here, a step of the swarm 2.0 s" in told[0]["message"]


@pytest.mark.parametrize(("missed", "samples"), [(1, 4), (2, 2), (100, 1)])
def test_batch_size_follows_missed_steps(lateness, late, missed, samples):
    late(missed=missed)
    assert lateness.samples_in_time == samples


def test_batches_grow_after_many_in_time(lateness, late, in_time, told):
    late(missed=2)
    for size in (2, 4):
        assert lateness.samples_in_time == size
        in_time(ENOUGH_IN_TIME)
    late(missed=2)
    assert lateness.samples_in_time == 2
    assert codes(told) == ["slow"], "it is said once"


def test_isolated_late_batches_are_ignored(lateness, late, in_time, told):
    for _ in range(3):
        late(times=1)
        in_time(4)
    assert lateness.samples_in_time == math.inf
    assert not told


def test_short_late_batches_are_ignored(lateness, late, swarm, told):
    """Each batch took half of a step's time; after each, the peer fetched the step that it had missed."""
    for _ in range(8):
        late(times=1, samples=1, seconds=0.4, usual_s=0.4, missed=1)
        swarm.go_on(0.4, 0)
    assert lateness.samples_in_time == math.inf
    assert not told


def test_long_evaluations_keep_batch_size(lateness, late, told):
    late(usual_s=0.5)
    assert lateness.samples_in_time == math.inf
    assert not told


def test_hopeless_peer_doubles_pauses(lateness, late):
    late(samples=1)
    pauses = [lateness.next_pause_s() for _ in range(3)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
