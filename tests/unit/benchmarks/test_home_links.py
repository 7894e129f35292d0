"""The figures of the home-link benchmarks: which steps are joint, and what the window holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from home_links import LEARNING_RATE, Committed, Joint, Told, find_joint, find_window

STEP = 20.0


def told(*steps):
    """What a peer tells that committed steps, each given as (key, time, samples, is_share, weight)."""
    return Told(
        committed={
            key: Committed(at, key, samples, is_share, (weight,) * 3)
            for key, at, samples, is_share, weight in steps
        }
    )


def every(seconds, count):
    return [Joint(STEP + number * seconds, 100, 0.0) for number in range(count)]


def test_a_step_counts_when_both_have_committed_it_and_from_then_on():
    both = find_joint([told(("a", 1.0, 100, False, 0.0)), told(("a", 1.5, 100, False, 0.0))])

    assert [(one.at, one.samples) for one in both] == [(1.5, 100)]


def test_a_step_of_one_peer_alone_does_not_count():
    assert find_joint([told(("a", 1.0, 100, False, 0.0)), told(("b", 1.0, 100, False, 0.0))]) == []


def test_shares_of_the_samples_add_up():
    both = find_joint([told(("3", 1.0, 48, True, 0.0)), told(("3", 1.0, 51, True, 0.0))])

    assert both[0].samples == 99


def test_an_average_between_two_models_does_not_count():
    apart = 2 * LEARNING_RATE

    assert find_joint([told(("3", 1.0, 50, True, 0.0)), told(("3", 1.0, 50, True, apart))]) == []


def test_the_window_has_whole_cycles_and_the_one_that_is_under_way():
    window, is_closed = find_window(every(7.0, 10), 20.0, 0.0, 100.0)

    assert is_closed
    assert (window.start, window.end) == (STEP, STEP + 21.0)
    assert (window.steps, window.samples) == (3, 300)


def test_a_swarm_that_stops_committing_pays_for_the_time():
    window, is_closed = find_window(every(7.0, 2), 20.0, 0.0, 100.0)

    assert not is_closed
    assert (window.start, window.end, window.samples) == (STEP, 100.0, 100)


def test_without_a_joint_step_nothing_is_counted():
    window, is_closed = find_window([], 20.0, 3.0, 100.0)

    assert not is_closed
    assert (window.start, window.end, window.samples) == (3.0, 100.0, 0)


def test_the_window_does_not_depend_on_what_comes_after_it():
    closed = find_window(every(7.0, 4), 20.0, 0.0, 50.0)

    assert closed == find_window(every(7.0, 9), 20.0, 0.0, 90.0)
    assert closed[0].samples / (closed[0].end - closed[0].start) == pytest.approx(100 / 7)
