"""Which processes fail, and which are only slow; time, looks and processor time are counted by the test."""

import concurrent.futures
import os
import threading

import pytest

from trahiv_cli.swarm.vitals import (
    LOOK_EVERY_S,
    PULSE_EVERY_S,
    SLOW_AFTER_S,
    STILL_AFTER_LOOKS,
    Vitals,
    effort_of,
)


class Node:
    """A node whose process does as the test says; each look at it counts."""

    def __init__(self, answers=True, is_busy=False, is_stopped=False):
        self.runs, self.answers, self.asked = True, answers, 0
        self.used_s, self.is_busy, self.is_stopped, self.pending = 0.0, is_busy, is_stopped, None

    def is_alive(self):
        return self.runs

    def pulse(self):
        self.asked += 1
        if isinstance(self.answers, OSError):
            raise self.answers
        self.pending = concurrent.futures.Future()
        if isinstance(self.answers, Exception):
            self.pending.set_exception(self.answers)
        elif self.answers:
            self.pending.set_result(None)
        return self.pending

    def pids(self):
        return []

    def effort(self, pids):
        self.used_s += 0.3 * self.is_busy
        return self.used_s, self.is_stopped


def watch(node, clock):
    """Watch a node; return `look(s)`, which looks for so long, and says how long and what was told."""
    told = []
    vitals = Vitals(node, told.append, clock, node.effort)

    def look(seconds):
        began = clock.now
        while clock.now < began + seconds and not vitals.ailment:
            clock.now += LOOK_EVERY_S
            vitals.look()
        return clock.now - began, told

    return look


def test_a_process_that_answers_is_well_though_the_machine_sleeps_and_its_end_is_found_at_once(clock):
    look = watch(node := Node(), clock)
    look(600)
    assert 600 / PULSE_EVERY_S / 2 <= node.asked <= 600 / PULSE_EVERY_S
    node.answers = False
    look(PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    node.pending.set_result(None)
    clock.now += 7200  # a suspended machine: hours go by between two looks
    node.answers = True
    assert look(60)[1] == []
    node.runs = False
    assert look(10) == (LOOK_EVERY_S, ["the DHT's process, or its daemon p2pd, has ended"])


@pytest.mark.parametrize(
    ("state", "least_s", "most_s", "said"),
    [
        ({"answers": False}, 0.0, 10.0, "stands still"),
        ({"answers": False, "is_busy": True}, SLOW_AFTER_S, SLOW_AFTER_S + 5, "did not answer"),
        # as p2pd beside the DHT's process: they answer together
        ({"answers": False, "is_busy": True, "is_stopped": True}, 0.0, 10.0, "stands still"),
        ({"answers": ConnectionRefusedError("p2pd is gone")}, 0.0, 2 * PULSE_EVERY_S, "p2pd is gone"),
        ({"answers": ValueError("nonsense")}, 0.0, 2 * PULSE_EVERY_S, "nonsense"),
    ],
)
def test_one_that_fails_is_found_and_a_busy_one_is_given_time(clock, state, least_s, most_s, said):
    took_s, [told] = watch(Node(**state), clock)(600)
    assert least_s <= took_s <= most_s and said in told


def test_a_process_that_is_gone_has_used_no_time_and_this_one_is_not_stopped():
    used_s, is_stopped = effort_of([os.getpid(), 2**22 + 1])
    assert used_s > 0 and not is_stopped and effort_of([2**22 + 1]) == (0.0, False)


def test_the_thread_ends_with_an_ailment_and_when_it_is_closed():
    said, node = threading.Event(), Node()
    node.runs = False
    ill, well, homeless = Vitals(node, lambda ailment: said.set()), Vitals(Node()), Vitals(None)
    ill.start()
    assert said.wait(10) and ill.ailment.endswith("has ended")
    well.close()  # before it began
    for vitals in (well, homeless):
        vitals.start()
    for vitals in (ill, well, well, homeless):
        vitals.close()
    assert "vitals" not in {thread.name for thread in threading.enumerate()}
