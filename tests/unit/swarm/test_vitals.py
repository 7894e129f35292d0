"""Which process is ill, and which is only slow; time, looks and processor time are counted by the test."""

from __future__ import annotations

import concurrent.futures

import pytest

from trahiv_cli.swarm import vitals
from trahiv_cli.swarm.vitals import LOOK_EVERY_S, PULSE_EVERY_S, SLOW_AFTER_S, STILL_AFTER_LOOKS, Vitals


class Process:
    """A process that does as the test says."""

    def __init__(self, name="the process"):
        self.name, self.runs, self.answers, self.used_s, self.asked = name, True, True, 0.0, 0
        self.is_stopped = False

    def is_alive(self):
        return self.runs

    def pulse(self):
        self.asked += 1
        if isinstance(self.answers, OSError):
            raise self.answers
        future = concurrent.futures.Future()
        if isinstance(self.answers, Exception):
            future.set_exception(self.answers)
        elif self.answers:
            future.set_result(None)
        return future

    def pids(self):
        return [self]


@pytest.fixture
def clock(monkeypatch):
    def effort(pids):
        return sum(one.used_s for one in pids), any(one.is_stopped for one in pids)

    monkeypatch.setattr(vitals, "_effort", effort)
    return [1000.0]


@pytest.fixture
def watch(clock):
    """`watch(vitals, seconds)` looks as often as the thread would, and says how long it took to find out."""

    def look(watched, seconds, work=lambda: None):
        began = clock[0]
        while clock[0] < began + seconds and not watched.ailment:
            clock[0] += LOOK_EVERY_S
            work()
            watched.look()
        return clock[0] - began

    return look


def test_processes_that_answer_are_well(clock, watch):
    processes = [Process("one"), Process("two")]
    watched = Vitals(processes, clock=lambda: clock[0])
    watch(watched, 600)
    assert watched.ailment == ""
    assert all(600 / PULSE_EVERY_S / 2 <= process.asked <= 600 / PULSE_EVERY_S for process in processes)


def test_one_that_ended_is_found_at_once(clock, watch):
    one, two = Process("the first process"), Process("the second process")
    watched = Vitals([one, two], clock=lambda: clock[0])
    watch(watched, 10)
    two.runs = False
    assert watch(watched, 10) <= 1.0
    assert watched.ailment == "the second process has ended"


def test_one_that_stands_still_is_found_within_ten_seconds(clock, watch):
    one = Process()
    watched = Vitals([one], clock=lambda: clock[0])
    watch(watched, 10)
    one.answers = False
    assert watch(watched, 60) <= 10.0
    assert watched.ailment == "the process stands still"


def test_a_busy_one_is_given_time(clock, watch):
    one = Process()
    one.answers = False

    def work():
        one.used_s += 0.3

    watched = Vitals([one], clock=lambda: clock[0])
    assert SLOW_AFTER_S <= watch(watched, 600, work) <= SLOW_AFTER_S + 5
    assert "did not answer" in watched.ailment


def test_one_that_was_stopped_is_found_also_beside_a_busy_one(clock, watch):
    """As p2pd beside the DHT's process: they answer together."""
    one = Process()
    one.answers, one.is_stopped, said = False, True, []

    def work():
        one.used_s += 0.3

    assert watch(Vitals([one], said.append, clock=lambda: clock[0]), 600, work) <= 10.0
    assert said == ["the process stands still"]


def test_a_suspended_machine_is_no_ailment(clock, watch):
    """Hours go by between two looks; then all goes on."""
    one = Process()
    watched = Vitals([one], clock=lambda: clock[0])
    watch(watched, 5)
    one.answers = False
    watch(watched, PULSE_EVERY_S + LOOK_EVERY_S * (STILL_AFTER_LOOKS // 2))
    watched._states[one.name].answer.set_result(None)
    clock[0] += 7200
    one.answers = True
    watch(watched, 60)
    assert watched.ailment == ""


@pytest.mark.parametrize("error", [ConnectionRefusedError("p2pd is gone"), ValueError("nonsense")])
def test_one_that_answers_with_an_error_is_ill(clock, watch, error):
    one = Process()
    one.answers = ValueError("inner") if isinstance(error, ValueError) else error
    watched = Vitals([one], clock=lambda: clock[0])
    assert watch(watched, 60) <= 2 * PULSE_EVERY_S
    assert watched.ailment.startswith("the process")


def test_the_thread_ends_with_an_ailment_and_when_it_is_closed():
    one = Process()
    one.runs = False
    watched = Vitals([one])
    watched.start()
    watched._thread.join(10)
    assert watched.ailment == "the process has ended" and not watched._thread.is_alive()
    watched.close()
    well = Vitals([Process()])
    well.close()
    well.start()
    well.close()
    assert not well._thread.is_alive()
