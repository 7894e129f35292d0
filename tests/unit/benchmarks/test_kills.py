"""What kills cost the others, told from what these said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from kills import Cost, longest_of, rate_of


def step(t, samples):
    return {"event": "step", "t": t, "my_samples": samples}


PEERS = [[step(t, 10) for t in (0, 5, 10, 15)], [step(t, 20) for t in (1, 6, 16, 21)]]


def test_the_rate_is_that_of_all_from_each_first_step_to_its_last():
    assert rate_of(PEERS, 0, 16.5) == pytest.approx(30 / 15 + 40 / 15)


def test_the_longest_time_between_steps_is_that_of_one_peer():
    assert longest_of(PEERS, 0, 30) == 10


def test_what_is_lost_is_a_share_of_the_rate_before():
    assert Cost(10, 10, 40.0, 39.0, 5.0, 9.0).lost == pytest.approx(0.025)
