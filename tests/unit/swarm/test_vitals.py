"""Which process is ill, and which is only slow; time, looks and processor time are counted by the test."""

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


class Process:
    """A process that does as the test says; each look at it counts."""

    def __init__(self, name="the process", answers=True, is_busy=False, is_stopped=False):
        self.name, self.runs, self.answers, self.asked = name, True, answers, 0
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
        self.used_s += 0.3 * self.is_busy
        return [self]


@pytest.fixture
def watched(clock):
    """`watched(*processes)` watches them; `look(s)` looks for so long, and says how long it took."""

    def watch(*processes, **options):
        def effort(processes):
            return sum(one.used_s for one in processes), any(one.is_stopped for one in processes)

        vitals = Vitals(processes, clock=clock, effort=effort, **options)

        def look(seconds):
            began = clock.now
            while clock.now < began + seconds and not vitals.ailment:
                clock.now += LOOK_EVERY_S
                vitals.look()
            return clock.now - began

        return vitals, look

    return watch


def test_processes_that_answer_are_well_though_the_machine_sleeps_and_one_that_ended_is_found_at_once(
    clock, watched
):
    one, two = processes = [Process("one"), Process("two")]
    vitals, look = watched(*processes)
    look(600)
    assert all(600 / PULSE_EVERY_S / 2 <= process.asked <= 600 / PULSE_EVERY_S for process in processes)
    one.answers = False
    look(PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    one.pending.set_result(None)
    clock.now += 7200  # a suspended machine: hours go by between two looks
    one.answers = True
    look(60)
    assert vitals.ailment == ""
    two.runs = False
    assert look(10) <= 1.0 and vitals.ailment == "two has ended"


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
def test_one_that_fails_is_found_and_a_busy_one_is_given_time(watched, state, least_s, most_s, said):
    told = []
    vitals, look = watched(Process(**state), report=told.append)
    assert least_s <= look(600) <= most_s
    assert told == [vitals.ailment] and vitals.ailment.startswith("the process") and said in told[0]


def test_a_process_that_is_gone_has_used_no_time_and_this_one_is_not_stopped():
    used_s, is_stopped = effort_of([os.getpid(), 2**22 + 1])
    assert used_s > 0 and not is_stopped and effort_of([2**22 + 1]) == (0.0, False)


def test_the_thread_ends_with_an_ailment_and_when_it_is_closed():
    said, one = threading.Event(), Process()
    one.runs = False
    ill, well = Vitals([one], lambda ailment: said.set()), Vitals([Process()])
    ill.start()
    assert said.wait(10) and ill.ailment == "the process has ended"
    well.close()  # before it began
    well.start()
    for vitals in (ill, well, well):
        vitals.close()
    assert "vitals" not in {thread.name for thread in threading.enumerate()}
