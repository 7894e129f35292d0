"""The swarm's time goes on whatever happens to a machine's clock; who enters a swarm takes it over."""

import ctypes
import math
import sys
import time
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import hivemind
import pytest

from trahiv_cli.swarm import clock, corrections
from trahiv_cli.swarm.clock import Answer, swarm_time, take_over


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    monkeypatch.setattr(clock, "_ahead", RawValue(ctypes.c_double, 0.0))


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_it_is_the_machine_s_time_and_goes_on_when_that_is_set(monkeypatch, jump):
    before, machine = swarm_time(), time.time
    assert before == pytest.approx(time.time(), abs=1.0)
    monkeypatch.setattr(time, "time", lambda: machine() + jump)
    assert 0 <= swarm_time() - before < 5


def test_hivemind_takes_it_for_its_own_everywhere_where_upstream_still_takes_the_machine_s_clock():
    corrections.apply()
    of_hivemind = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hivemind"]
    clocks = [module.get_dht_time for module in of_hivemind if hasattr(module, "get_dht_time")]
    assert len(clocks) > 8 and set(clocks) == {swarm_time}
    source = f"{hivemind.__path__[0]}/utils/timed_storage.py"
    assert "get_dht_time = time.time" in Path(source).read_text()


@pytest.mark.parametrize(
    ("told", "delay", "taken"),
    [
        *(([-3600.0], 0.2, -3600.0), ([5.0], 0.2, 5.0), ([0.9], 0.1, 0.0), ([3.0], 6.0, 0.0)),
        *(([5000.0, 60.0, 60.5], 0.0, 60.5), ([-5000.0, 60.0, 60.5], 0.0, 60.0), ([], 0.0, 0.0)),
        *(([math.nan, 60.0, 60.5, 5000.0], 0.0, 60.5), ([5000.0, 0.0], 0.0, 0.0)),
    ],
)
def test_of_several_times_the_one_in_the_middle_is_taken_over(told, delay, taken):
    now = swarm_time()
    answers = [Answer(now + ahead, now - delay / 2, now + delay / 2) for ahead in told]
    assert take_over(answers) == pytest.approx(taken)
    assert swarm_time() - now == pytest.approx(taken, abs=1.0)


@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf, 0.0, 86400.0, 1e15])
def test_a_time_that_is_none_or_nobody_s_is_not_taken_over(theirs):
    now = swarm_time()
    assert take_over([Answer(theirs, now, now)]) == 0.0
    assert take_over([Answer(theirs, now, now)] * 3 + [Answer(now + 60, now, now)]) == 60.0
    assert swarm_time() - now == pytest.approx(60.0, abs=1.0)
