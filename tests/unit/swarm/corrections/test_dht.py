"""One process serves the DHT and this peer's averagers, and hivemind still has one for each."""

import asyncio
import gc
import multiprocessing
import queue
import signal
import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import hivemind
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging import averager as hivemind_averager
from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture, MSGPackSerializer

from tests.kit.identities import key_of
from trahiv_cli.errors import SwarmError
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.swarm.corrections import dht as corrected
from trahiv_cli.swarm.corrections.dht import (
    NODES_ASKED,
    CorrectedAverager,
    CorrectedControl,
    CorrectedDHT,
    drain,
    give_states,
)
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.node import show_life

P2P_CALLS = ("replicate", "list_peers", "shutdown")


def dht_without_process():
    return CorrectedDHT(start=False, door=Door(), signing_key=key_of("peer"), place=b"")


def test_a_forked_process_s_collector_leaves_alone_what_it_inherits_and_few_nodes_are_asked(monkeypatch):
    left_alone, before = [], gc.get_freeze_count()
    monkeypatch.setattr(hivemind.DHT, "start", lambda self: left_alone.append(gc.get_freeze_count()))
    dht = dht_without_process()
    dht.start()
    assert left_alone[0] > before == gc.get_freeze_count()
    dht.get("key", return_future=True)
    _, _, keywords = dht._inner_pipe.recv()
    assert keywords["beam_size"] == NODES_ASKED


@pytest.mark.parametrize("answer", [None, OSError("no p2pd")], ids=["it has started", "it ends by itself"])
def test_ctrl_c_while_a_dht_starts_leaves_no_process(monkeypatch, answer):
    def interrupt(*_):
        raise KeyboardInterrupt

    dht, ended = dht_without_process(), []
    dht._ready, dht.kill, dht.join = Future(), lambda: ended.append("killed"), lambda: ended.append("gone")
    dht._ready.set_exception(answer) if answer else dht._ready.set_result(None)
    monkeypatch.setattr(corrected, "require_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dht.wait_until_ready()
    assert ended == ([] if answer else ["killed", "gone"])


class Host:
    """A DHT whose process serves averagers, as an averager sees it."""

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
    assert started.is_alive()
    drain(started, quiet_s=0)
    assert not started.allow_state_sharing
    started._ended.set_result(None)  # as the DHT's process does when it serves it no more
    started.join(timeout=5.0)
    assert not started.is_alive()


@pytest.mark.parametrize(("is_running", "timeout"), [(True, 0.1), (False, None)])
def test_an_averager_that_nobody_takes_over_is_not_waited_for(is_running, timeout):
    started = averager(is_running=is_running)
    with pytest.raises(SwarmError, match="while it started"):
        started.run_in_background(timeout=timeout)
    started.dht.is_running = False  # or it would be shut down, and waited for


def test_no_sign_of_life_is_expected_of_an_averager_that_was_shut_down(monkeypatch):
    async def done(*_):
        return p2p

    p2p = SimpleNamespace(peer_id=None, daemon_listen_maddr="", **dict.fromkeys(P2P_CALLS, done))
    monkeypatch.setattr(corrected.GuardedP2P, "behind", lambda door: p2p)
    monkeypatch.setattr(hivemind_averager, "switch_to_uvloop", asyncio.new_event_loop)
    dht = dht_without_process()
    dht._peer_id, dht._node = "QmMe", SimpleNamespace(protocol=SimpleNamespace(p2p=p2p))

    def pulse():
        asyncio.run(asyncio.wait_for(show_life(dht, dht._node), timeout=10))

    served = averager()
    served.start()
    served.client_mode, served._ready, served._ended = True, Future(), Future()  # as in the DHT's process
    thread = threading.Thread(target=served.serve, args=[dht, served._inner_pipe], daemon=True)
    thread.start()
    served._ready.result(timeout=10)
    pulse()
    assert len(dht.loops) == 1
    served._outer_pipe.send(("_shutdown", [None], {}))
    thread.join()
    pulse()


def test_an_averager_serves_its_own_handlers_and_not_upstream_s_download():
    DecentralizedAverager._collect_rpc_handlers()
    ExactStateAverager._collect_rpc_handlers()
    served = {handler.method_name for handler in ExactStateAverager._rpc_handlers}
    assert served == {"rpc_offer_state", "rpc_send_state"}
    assert ExactStateAverager._stub_type.__name__ == "ExactStateAveragerStub"


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


class Giver:
    """Gives a state, and knows whether anybody holds it still."""

    given = None

    def state(self):
        if self.given is None:
            raise KeyError("not finite")
        self.given = weakref.ref(tensor := torch.zeros(3))
        return {"step": 7}, [tensor], ["info"]


def test_who_asks_for_a_state_gets_it_or_learns_why_not_and_nobody_holds_it_then(caplog):
    giver, asking, let_go = (
        Giver(),
        SimpleNamespace(recv=(asked := queue.SimpleQueue()).get),
        threading.Event(),
    )
    thread = threading.Thread(
        target=give_states, args=[MSGPackSerializer, asking, weakref.WeakMethod(giver.state)]
    )
    thread.start()
    asked.put(("_TRIGGER_GET_CURRENT_STATE", answer := Future()))
    with pytest.raises(KeyError, match="not finite"):
        answer.result(timeout=10)
    assert "not copied" in caplog.text
    giver.given = True
    asked.put(("_TRIGGER_GET_CURRENT_STATE", answer := Future()))
    metadata, tensors, infos = answer.result(timeout=10)
    assert MSGPackSerializer.loads(metadata) == {"step": 7} and infos == ["info"]
    assert torch.equal(tensors[0], torch.zeros(3))
    weakref.finalize(giver.given(), let_go.set)
    del answer, tensors
    assert let_go.wait(10)
    asked.put(("_SHUTDOWN", None))
    thread.join(10)
    assert not thread.is_alive()
