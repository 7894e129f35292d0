"""The swarm's time is independent of later changes to a machine's clock, and joiners take it over."""

import ctypes
import math
import time
from multiprocessing.sharedctypes import RawValue

import pytest

from trahiv_cli import clock
from trahiv_cli.clock import swarm_time, take_over


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_swarm_time_ignores_clock_changes(monkeypatch, jump):
    before, machine = swarm_time(), time.time
    assert before == pytest.approx(time.time(), abs=1.0)
    monkeypatch.setattr(time, "time", lambda: machine() + jump)
    assert 0 <= swarm_time() - before < 5


@pytest.mark.parametrize(
    ("told", "delay", "taken"),
    [
        *(([-3600.0], 0.2, -3600.0), ([5.0], 0.2, 5.0), ([0.9], 0.1, 0.0), ([3.0], 6.0, 0.0)),
        *(([5000.0, 60.0, 60.5], 0.0, 60.5), ([-5000.0, 60.0, 60.5], 0.0, 60.0), ([], 0.0, 0.0)),
        *(([math.nan, 60.0, 60.5, 5000.0], 0.0, 60.5), ([5000.0, 0.0], 0.0, 0.0)),
        *(([theirs], 0.0, 0.0) for theirs in (math.nan, math.inf, -math.inf, -(2.0**32), 1e15)),
    ],
)
def test_median_time_is_taken_over(monkeypatch, told, delay, taken):
    monkeypatch.setattr(clock, "_ahead", RawValue(ctypes.c_double, 0.0))
    now = swarm_time()
    assert take_over([(ahead, delay) for ahead in told]) == pytest.approx(taken)
    assert swarm_time() - now == pytest.approx(taken, abs=1.0)
