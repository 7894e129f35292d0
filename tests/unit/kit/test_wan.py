"""A line of the simulated network keeps to its rate and its queue."""

from __future__ import annotations

import math

import pytest

from tests.kit.wan import MIN_QUEUE_BYTES, QUEUE_S, Line

PACKET = bytes(1250)
"""Takes a millisecond at 10 Mbit/s."""


def offer(line, *times):
    for at in times:
        line.offer(at, PACKET)


@pytest.mark.parametrize(
    ("times", "leave"), [((5.0, 5.0, 5.0), [5.001, 5.002, 5.003]), ((1.0, 3.0), [1.001, 3.001])]
)
def test_packets_leave_one_after_the_other_at_the_rate(times, leave):
    line = Line(10)
    offer(line, *times)
    assert [at for at, _ in line.take(6.0)] == pytest.approx(leave)


def test_what_has_not_left_yet_waits():
    line = Line(10)
    assert line.next_at() == math.inf
    offer(line, 0.0, 0.0, 0.0)
    assert len(line.take(0.0021)) == 2
    assert line.next_at() == pytest.approx(0.003)
    assert line.waiting_bytes == len(PACKET)


@pytest.mark.parametrize(("rate_mbit", "limit"), [(1, MIN_QUEUE_BYTES), (100, int(QUEUE_S * 100e6 / 8))])
def test_a_full_queue_drops_what_comes_last_and_an_empty_one_takes_packets_again(rate_mbit, limit):
    line = Line(rate_mbit)
    fitting = limit // len(PACKET)
    offer(line, *[0.0] * (fitting + 3))
    assert line.dropped_packets == 3
    assert len(line.take(60.0)) == fitting
    assert line.carried_bytes == fitting * len(PACKET)
    offer(line, 60.0)
    assert line.dropped_packets == 3
    assert len(line.take(61.0)) == 1


def test_a_new_rate_holds_for_what_waits_already_and_drops_none_of_it():
    line = Line(10)
    offer(line, 0.0, 0.0)
    line.take(0.001)
    line.set_rate(5)
    assert [at for at, _ in line.take(1.0)] == pytest.approx([0.003])
    line = Line(100)
    offer(line, *[0.0] * 500)
    line.set_rate(5)
    assert len(line.take(60.0)) == 500
