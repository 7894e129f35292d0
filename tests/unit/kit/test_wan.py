"""A line of the simulated network keeps to its rate and its queue."""

from __future__ import annotations

import math

import pytest

from tests.kit.wan import MIN_QUEUE_BYTES, QUEUE_S, Line

PACKET = bytes(1250)
"""Takes a millisecond at 10 Mbit/s."""


def line_with(rate_mbit, *times):
    line = Line(rate_mbit)
    for at in times:
        line.offer(at, PACKET)
    return line


def test_packets_leave_one_after_the_other_at_the_rate_and_what_has_not_left_waits():
    assert Line(10).next_at() == math.inf
    line = line_with(10, 5.0, 5.0, 5.0, 7.0)
    assert [at for at, _ in line.take(5.0021)] == pytest.approx([5.001, 5.002])
    assert line.next_at() == pytest.approx(5.003)
    assert line.waiting_bytes == 2 * len(PACKET)
    assert [at for at, _ in line.take(8.0)] == pytest.approx([5.003, 7.001])


@pytest.mark.parametrize(("rate_mbit", "limit"), [(1, MIN_QUEUE_BYTES), (100, int(QUEUE_S * 100e6 / 8))])
def test_a_full_queue_drops_what_comes_last_and_an_empty_one_takes_packets_again(rate_mbit, limit):
    fitting = limit // len(PACKET)
    line = line_with(rate_mbit, *[0.0] * (fitting + 3))
    assert line.dropped_packets == 3
    assert len(line.take(60.0)) == fitting
    assert line.carried_bytes == fitting * len(PACKET)
    line.offer(60.0, PACKET)
    assert line.dropped_packets == 3 and len(line.take(61.0)) == 1


def test_a_new_rate_holds_for_what_waits_already_and_drops_none_of_it():
    line = line_with(10, 0.0, 0.0)
    line.take(0.001)
    line.set_rate(5)
    assert [at for at, _ in line.take(1.0)] == pytest.approx([0.003])
    line = line_with(100, *[0.0] * 500)
    line.set_rate(5)
    assert len(line.take(60.0)) == 500
