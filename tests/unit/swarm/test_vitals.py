"""Which process is ill, and which is only slow; time, looks and processor time are counted by the test."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from trahiv_cli.swarm.vitals import LOOK_EVERY_S, PULSE_EVERY_S, SLOW_AFTER_S, STILL_AFTER_LOOKS, Vitals


class Process:
    """A process that does as the test says; each look at it counts."""

    def __init__(self, name="the process"):
        self.name, self.runs, self.answers, self.asked = name, True, True, 0
        self.used_s, self.is_busy, self.is_stopped, self.pending = 0.0, False, False, None

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


def effort(processes):
    return sum(one.used_s for one in processes), any(one.is_stopped for one in processes)


@pytest.fixture
def watched(clock):
    """`watched(*processes)` watches them with the test's clock."""
    return lambda *processes, **options: Vitals(processes, clock=clock, effort=effort, **options)


@pytest.fixture
def watch(clock):
    """`watch(vitals, seconds)` looks as often as the thread would, and says how long it took to find out."""

    def look(vitals, seconds):
        began = clock.now
        while clock.now < began + seconds and not vitals.ailment:
            clock.now += LOOK_EVERY_S
            vitals.look()
        return clock.now - began

    return look


def test_processes_that_answer_are_well(watched, watch):
    processes = [Process("one"), Process("two")]
    vitals = watched(*processes)
    watch(vitals, 600)
    assert vitals.ailment == ""
    assert all(600 / PULSE_EVERY_S / 2 <= process.asked <= 600 / PULSE_EVERY_S for process in processes)


def test_one_that_ended_is_found_at_once(watched, watch):
    one, two = Process("the first process"), Process("the second process")
    vitals = watched(one, two)
    watch(vitals, 10)
    two.runs = False
    assert watch(vitals, 10) <= 1.0
    assert vitals.ailment == "the second process has ended"


def test_one_that_stands_still_is_found_within_ten_seconds(watched, watch):
    one = Process()
    vitals = watched(one)
    watch(vitals, 10)
    one.answers = False
    assert watch(vitals, 60) <= 10.0
    assert vitals.ailment == "the process stands still"


def test_a_busy_one_is_given_time(watched, watch):
    one = Process()
    one.answers, one.is_busy = False, True
    vitals = watched(one)
    assert SLOW_AFTER_S <= watch(vitals, 600) <= SLOW_AFTER_S + 5
    assert "did not answer" in vitals.ailment


def test_one_that_was_stopped_is_found_also_beside_a_busy_one(watched, watch):
    """As p2pd beside the DHT's process: they answer together."""
    one, said = Process(), []
    one.answers, one.is_busy, one.is_stopped = False, True, True
    assert watch(watched(one, report=said.append), 600) <= 10.0
    assert said == ["the process stands still"]


def test_a_suspended_machine_is_no_ailment(clock, watched, watch):
    """Hours go by between two looks; then all goes on."""
    one = Process()
    vitals = watched(one)
    watch(vitals, 5)
    one.answers = False
    watch(vitals, PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    one.pending.set_result(None)
    clock.now += 7200
    one.answers = True
    watch(vitals, 60)
    assert vitals.ailment == ""


@pytest.mark.parametrize("error", [ConnectionRefusedError("p2pd is gone"), ValueError("nonsense")])
def test_one_that_answers_with_an_error_is_ill(watched, watch, error):
    one = Process()
    one.answers = error
    vitals = watched(one)
    assert watch(vitals, 60) <= 2 * PULSE_EVERY_S
    assert vitals.ailment.startswith("the process") and str(error) in vitals.ailment


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
