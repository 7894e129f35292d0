"""The swarm's time is independent of later changes to a machine's clock, and joiners take it over."""

import ctypes
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
    "told, delay, taken",
    [
        ("-3600", 0.2, -3600.0),
        ("5", 0.2, 5.0),
        ("0.9", 0.1, 0.0),
        ("3", 6.0, 0.0),
        ("5000 60 60.5", 0.0, 60.5),
        ("-5000 60 60.5", 0.0, 60.0),
        ("nan 60 60.5 5000", 0.0, 60.5),
        ("5000 0", 0.0, 0.0),
        ("", 0.0, 0.0),
        *((theirs, 0.0, 0.0) for theirs in ("nan", "inf", "-inf", "-4294967296", "1e15")),
    ],
)
def test_median_time_is_taken_over(monkeypatch, told, delay, taken):
    monkeypatch.setattr(clock, "_ahead", RawValue(ctypes.c_double, 0.0))
    now = swarm_time()
    assert take_over([(float(ahead), delay) for ahead in told.split()]) == pytest.approx(taken)
    assert swarm_time() - now == pytest.approx(taken, abs=1.0)
