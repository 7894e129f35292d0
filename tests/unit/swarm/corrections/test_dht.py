"""One process serves the DHT and this peer's averagers; in hivemind each still has its own."""

import asyncio
import gc
import multiprocessing
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
from trahiv_cli.swarm.corrections.dht import CorrectedAverager, CorrectedControl, CorrectedDHT
from trahiv_cli.swarm.door import Door
from trahiv_cli.swarm.node import show_life

P2P_CALLS = ("replicate", "list_peers", "shutdown")


@pytest.fixture
def dht():
    """A DHT without its process."""
    return CorrectedDHT(start=False, door=Door(), signing_key=key_of("peer"), place=b"")


def test_forked_process_freezes_inherited_objects(monkeypatch, dht):
    left_alone, before = [], gc.get_freeze_count()
    monkeypatch.setattr(hivemind.DHT, "start", lambda self: left_alone.append(gc.get_freeze_count()))
    dht.start()
    assert left_alone[0] > before == gc.get_freeze_count()


@pytest.mark.parametrize("answer", [None, OSError("no p2pd")], ids=["it has started", "it ends by itself"])
def test_interrupted_dht_start_leaves_no_process(monkeypatch, dht, answer):
    def interrupt(*_):
        raise KeyboardInterrupt

    ended = []
    dht._ready, dht.kill, dht.join = Future(), lambda: ended.append("killed"), lambda _: ended.append("gone")
    dht._ready.set_exception(answer) if answer else dht._ready.set_result(None)
    monkeypatch.setattr(corrected, "require_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dht.wait_until_ready()
    assert ended == (["gone"] if answer else ["killed", "gone"])


@pytest.mark.parametrize("has_meeting", [True, False])
def test_meeting_closes_before_dht(monkeypatch, dht, has_meeting):
    async def end(self):
        ended.append("meeting" if self is meeting else "DHT")

    ended, meeting = [], SimpleNamespace()
    meeting.close = lambda: end(meeting)
    monkeypatch.setattr(hivemind.DHT, "_shutdown", end)
    dht._node = SimpleNamespace(meeting=meeting if has_meeting else None)
    asyncio.run(dht._shutdown())
    dht._node = SimpleNamespace()  # its reach was never looked up
    asyncio.run(dht._shutdown())
    assert ended == [*["meeting"] * has_meeting, "DHT", "DHT"]


class Host:
    """A DHT whose process serves averagers, as an averager sees it."""

    client_mode = False

    def __init__(self, is_running=True):
        self.served, self.is_alive = [], lambda: is_running
        self.host = self.served.append


class Averager(CorrectedAverager):
    """An averager with an attribute of its own to send."""

    SERVED = ("own",)
    own, model = 1, "not to be sent"


def averager(is_running=True):
    return Averager([torch.zeros(1)], Host(is_running), prefix="run", start=False)


def test_averager_start_forks_nothing():
    before, children, started = signal.getsignal(signal.SIGINT), multiprocessing.active_children(), averager()
    started.run_in_background(await_ready=False)
    assert started.__getstate__().keys() == {*CorrectedAverager.SERVED, "own"}
    assert signal.getsignal(signal.SIGINT) is before
    assert started.dht.served == [started] and multiprocessing.active_children() == children
    assert started.is_alive()
    corrected.drain(started, quiet_s=0)
    assert not started.allow_state_sharing
    started._ended.set_result(None)  # as the DHT's process does when it stops serving it
    started.join(timeout=5.0)
    assert not started.is_alive()


@pytest.mark.parametrize(("is_running", "timeout"), [(True, 0.1), (False, None)])
def test_unserved_averager_start_fails(is_running, timeout):
    started = averager(is_running)
    with pytest.raises(SwarmError, match="while it started"):
        started.run_in_background(timeout=timeout)
    started._ended.set_result(None)  # otherwise it would be shut down, and waited for


def test_node_life_needs_averager_loops(monkeypatch, dht):
    async def done(*_):
        return p2p

    async def require_life(is_shown):
        life = asyncio.create_task(show_life(dht, dht._node))
        await asyncio.wait([life], timeout=10 if is_shown else 0.05)
        assert life.done() == is_shown
        may_go_on.set()
        await asyncio.wait_for(life, timeout=10)

    p2p = SimpleNamespace(peer_id=None, daemon_listen_maddr="", **dict.fromkeys(P2P_CALLS, done))
    monkeypatch.setattr(Door, "guarded", lambda door: p2p)
    monkeypatch.setattr(hivemind_averager, "switch_to_uvloop", asyncio.new_event_loop)
    dht._peer_id, dht._node = "QmMe", SimpleNamespace(protocol=SimpleNamespace(p2p=p2p))
    served, is_busy, may_go_on = averager(), threading.Event(), threading.Event()
    served.start()
    served.client_mode, served._ready, served._ended = True, Future(), Future()  # as in the DHT's process
    thread = threading.Thread(target=served.serve, args=[dht, served._inner_pipe], daemon=True)
    thread.start()
    served._ready.result(timeout=10)
    [loop] = dht.loops
    loop.call_soon_threadsafe(lambda: [is_busy.set(), may_go_on.wait()])
    is_busy.wait()
    asyncio.run(require_life(is_shown=False))
    asyncio.run(require_life(is_shown=True))
    served._outer_pipe.send(("_shutdown", [None], {}))
    thread.join()
    asyncio.run(require_life(is_shown=True))
    dht.loops.append(asyncio.new_event_loop())  # its thread has ended without a shutdown of its averager
    with pytest.raises(RuntimeError, match="has ended"):
        asyncio.run(require_life(is_shown=True))
    dht.loops[0].run_until_complete(asyncio.sleep(0))  # so that no request is left over


def test_averager_serves_only_own_handlers():
    DecentralizedAverager._collect_rpc_handlers()
    ExactStateAverager._collect_rpc_handlers()
    served = {handler.method_name for handler in ExactStateAverager._rpc_handlers}
    assert served == {"rpc_offer_state", "rpc_send_state"}
    assert ExactStateAverager._stub_type.__name__ == "ExactStateAveragerStub"


@pytest.mark.parametrize(
    ("cls", "is_cancelled"), [(CorrectedControl, True), (StepControl, False)], ids=["ours", "upstream still"]
)
def test_cancelled_step_is_visible_to_averager(cls, is_cancelled):
    control = cls(0.0, deadline=1.0, allow_retries=False, weight=1.0, data_for_gather=b"")
    told, trigger = [], MPFuture()
    trigger.set_result(None)
    control.attach(trigger, SimpleNamespace(set_result=lambda _: told.append(control.cancelled())))
    assert control.cancel()
    assert control.cancelled() and told == [is_cancelled]


class Asking:
    """A pipe with two requests for a state, of which the first fails."""

    def __init__(self):
        self.given, self.answers, self.is_held = None, [], []

    def recv(self):
        self.is_held.append(self.given is not None and self.given() is not None)
        if len(self.is_held) > 2:
            return "_SHUTDOWN", None
        (answer := Future()).add_done_callback(self.note)
        return "_TRIGGER_GET_CURRENT_STATE", answer

    def state(self):
        if len(self.is_held) == 1:
            raise KeyError("not finite")
        self.given = weakref.ref(tensor := torch.zeros(3))
        return {"step": 7}, [tensor], ["info"]

    def note(self, answer):
        if error := answer.exception():
            return self.answers.append(repr(error))
        metadata, [tensor], infos = answer.result()
        self.answers.append((MSGPackSerializer.loads(metadata), tensor.tolist(), infos))


def test_state_request_is_answered_and_released(caplog):
    asking = Asking()
    corrected.give_states(MSGPackSerializer, asking, weakref.WeakMethod(asking.state))
    assert asking.answers == ["KeyError('not finite')", ({"step": 7}, [0.0] * 3, ["info"])]
    assert "not copied" in caplog.text and asking.is_held == [False] * 3
    corrected.give_states(MSGPackSerializer, left := Asking(), weakref.WeakMethod(Asking().state))
    assert left.answers == [], "whose averager is gone"
