"""One process serves the DHT and this peer's averagers, and hivemind still has one for each."""

import gc
import inspect
import multiprocessing
import signal
from types import SimpleNamespace

import hivemind
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture

from tests.kit.identities import key_of
from trahiv_cli.errors import SwarmError
from trahiv_cli.swarm.corrections.dht import (
    CorrectedAverager,
    CorrectedControl,
    CorrectedDHT,
    CorrectedGradientAverager,
    drain,
)
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.state_averager import CorrectedStateAverager


def corrected_dht():
    return CorrectedDHT(start=False, door=Door(), signing_key=key_of("peer"), place=b"")


def test_a_forked_process_s_collector_leaves_alone_what_it_inherits(monkeypatch):
    left_alone, before = [], gc.get_freeze_count()
    monkeypatch.setattr(hivemind.DHT, "start", lambda self: left_alone.append(gc.get_freeze_count()))
    corrected_dht().start()
    assert left_alone[0] > before == gc.get_freeze_count()


class Host:
    """A DHT whose process serves averagers, as an averager sees it."""

    pid = 4321
    client_mode = False

    def __init__(self, is_running=True):
        self.served, self.is_running = [], is_running

    def host(self, averager):
        self.served.append(averager)

    def is_alive(self):
        return self.is_running


def averager(cls=CorrectedAverager, is_running=True):
    return cls([torch.zeros(1)], Host(is_running), prefix="run", start=False)


def test_starting_an_averager_leaves_ctrl_c_alone_forks_nothing_and_sends_what_is_needed():
    before, children = signal.getsignal(signal.SIGINT), multiprocessing.active_children()

    class Averager(CorrectedAverager):
        SERVED = ("own",)

    started = averager(Averager)
    started.own, started.model = 1, "not to be sent"
    started.run_in_background(await_ready=False)
    assert started.__getstate__().keys() == {*CorrectedAverager.SERVED, "own"}
    assert signal.getsignal(signal.SIGINT) is before
    assert started.dht.served == [started] and multiprocessing.active_children() == children
    assert started.is_alive() and started.pids() == [Host.pid]
    drain(started, quiet_s=0)
    assert not started.allow_state_sharing
    started._ended.set_result(None)  # as the DHT's process does when it serves it no more
    started.join(timeout=5.0)
    assert not started.is_alive()


@pytest.mark.parametrize(("is_running", "timeout"), [(True, 0.1), (False, None)])
def test_an_averager_that_nobody_takes_over_is_not_waited_for(is_running, timeout):
    started = averager(is_running=is_running)
    with pytest.raises(SwarmError, match="took over an averager"):
        started.run_in_background(timeout=timeout)
    started.dht.is_running = False  # or it would be shut down, and waited for


def test_upstream_still_forks_and_ignores_ctrl_c_once_an_averager_runs():
    assert issubclass(DecentralizedAverager, multiprocessing.Process)
    starting = inspect.getsource(DecentralizedAverager.run_in_background)
    assert "signal.signal(signal.SIGINT, signal.SIG_IGN)\n        self.start()" in starting


@pytest.mark.parametrize(
    ("cls", "own"),
    [(CorrectedGradientAverager, set()), (CorrectedStateAverager, {"rpc_offer_state", "rpc_send_state"})],
)
def test_corrected_averagers_serve_their_own_handlers_and_not_upstream_s_download(cls, own):
    DecentralizedAverager._collect_rpc_handlers()
    cls._collect_rpc_handlers()
    served = {handler.method_name for handler in cls._rpc_handlers}
    assert served == own | {"rpc_join_group", "rpc_aggregate_part"}
    assert cls._stub_type.__name__ == f"{cls.__name__}Stub"


@pytest.mark.parametrize(
    ("cls", "is_cancelled"), [(CorrectedControl, True), (StepControl, False)], ids=["ours", "upstream still"]
)
def test_a_step_is_cancelled_before_its_averager_looks(cls, is_cancelled):
    control = cls(0.0, deadline=1.0, allow_retries=False, weight=1.0, data_for_gather=b"")
    told, trigger = [], MPFuture()
    trigger.set_result(None)
    control.attach(trigger, SimpleNamespace(set_result=lambda _: told.append(control.cancelled())))
    assert control.cancel()
    assert control.cancelled() and told == [is_cancelled]
