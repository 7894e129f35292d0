"""Services work in the DHT's process; their handles command them from the training process."""

import asyncio
import socket
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError, Future
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.averaging.partition import AllreduceException

from tests.kit.identities import key_of
from trahiv_cli.errors import RoundFailed, SwarmError
from trahiv_cli.members.door import Door
from trahiv_cli.swarm import service as module
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.corrections.processes import require_start
from trahiv_cli.swarm.node import show_life
from trahiv_cli.swarm.service import Service, ServiceHandle, answer_requests

LIMIT_S = 10


class Echo(Service):
    """A service that answers, fails or waits, as the command says."""

    WIRE_NAME = "Echo"

    async def start(self, dht, p2p, pipe):
        await super().start(dht, p2p, pipe)
        self.pipe = pipe

    async def answer(self, value):
        return value

    async def fail(self, error):
        raise error

    async def ask(self):
        future = Future()
        self.pipe.send(future)
        return await asyncio.wrap_future(future)


class Pipe:
    """One end of a pipe within this process, whose messages stay the objects that they are."""

    def __init__(self, end):
        self._end, self._came = end, deque()
        self.fileno, self.poll = end.fileno, lambda: bool(self._came)

    def send(self, message):
        self.other._came.append(message)
        self._end.send(b"1")

    def recv(self):
        self._end.recv(1)
        return self._came.popleft()

    @classmethod
    def pair(cls):
        ours, theirs = map(cls, socket.socketpair())
        ours.other, theirs.other = theirs, ours
        return ours, theirs


@pytest.fixture
def dht(monkeypatch):
    """A DHT that hosts services in threads of this process."""

    async def done(*_):
        return p2p

    def host(work):
        ours, theirs = Pipe.pair()
        hosted.append(threading.Thread(target=work, args=[dht, theirs], daemon=True))
        hosted[-1].start()
        return ours

    hosted = []
    calls = dict.fromkeys(("replicate", "list_peers", "shutdown"), done)
    p2p = SimpleNamespace(peer_id=None, daemon_listen_maddr="", **calls)
    monkeypatch.setattr(Door, "guarded", lambda door: p2p)
    monkeypatch.setattr(module, "switch_to_uvloop", asyncio.new_event_loop)
    monkeypatch.setattr(module, "MPFuture", Future)
    dht = CorrectedDHT(start=False, door=Door(), signing_key=key_of("peer"), place=b"")
    dht._peer_id, dht._node = "QmMe", SimpleNamespace(protocol=SimpleNamespace(p2p=p2p))
    dht.host, dht.is_alive = host, lambda: True
    yield dht
    dht.is_alive = lambda: False
    for thread in hosted:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture
def handle(dht):
    handle = ServiceHandle(dht, Echo("run", is_client=True))
    yield handle
    handle.shutdown(LIMIT_S)
    assert not handle.is_alive()


def test_command_result_comes_as_future(handle):
    assert handle.request("answer", 7).result(LIMIT_S) == 7


def test_known_error_reaches_caller_unchanged(handle):
    error = AllreduceException("the round is over")
    assert handle.request("fail", error).exception(LIMIT_S) is error


def test_unknown_error_becomes_readable(handle, caplog):
    with pytest.raises(RoundFailed, match="KeyError: 'codec'"):
        handle.request("fail", KeyError("codec")).result(LIMIT_S)
    assert "Traceback" in caplog.text


def test_cancelled_command_cancels_its_future(handle):
    with pytest.raises(CancelledError):
        handle.request("fail", asyncio.CancelledError()).result(LIMIT_S)


def test_given_up_command_harms_no_other(handle):
    handle.request("answer", 1).cancel()
    assert handle.request("answer", 2).result(LIMIT_S) == 2


def test_service_asks_training_process(dht):
    handle = ServiceHandle(dht, Echo("run", is_client=True), give=lambda: "a copy")
    assert handle.request("ask").result(LIMIT_S) == "a copy"
    handle.shutdown(LIMIT_S)


@pytest.mark.parametrize("is_running", [True, False])
def test_service_that_does_not_start_fails(monkeypatch, is_running):
    monkeypatch.setattr(module, "require_start", partial(require_start, timeout_s=0.1))
    dht = SimpleNamespace(host=lambda work: None, is_alive=lambda: is_running)
    with pytest.raises(SwarmError, match="while it started"):
        ServiceHandle(dht, Echo("run", is_client=True))


def test_start_error_reaches_training_process(dht, monkeypatch):
    async def fail(*_):
        raise OSError("no p2pd")

    monkeypatch.setattr(Echo, "start", fail)
    with pytest.raises(OSError, match="no p2pd"):
        ServiceHandle(dht, Echo("run", is_client=True))


async def require_life(dht, may_go_on, is_shown):
    life = asyncio.create_task(show_life(dht, dht._node))
    await asyncio.wait([life], timeout=LIMIT_S if is_shown else 0.05)
    assert life.done() == is_shown
    may_go_on.set()
    await asyncio.wait_for(life, timeout=LIMIT_S)


def test_node_life_needs_service_loops(dht):
    handle = ServiceHandle(dht, Echo("run", is_client=True))
    is_busy, may_go_on = threading.Event(), threading.Event()
    [loop] = dht.loops
    loop.call_soon_threadsafe(lambda: [is_busy.set(), may_go_on.wait()])
    is_busy.wait()
    asyncio.run(require_life(dht, may_go_on, is_shown=False))
    handle.shutdown(LIMIT_S)
    asyncio.run(require_life(dht, may_go_on, is_shown=True))


def test_life_of_ended_service_thread_fails(dht):
    dht.loops.append(asyncio.new_event_loop())  # its thread has ended without a shutdown of its service
    with pytest.raises(RuntimeError, match="has ended"):
        asyncio.run(show_life(dht, dht._node))
    dht.loops[0].run_until_complete(asyncio.sleep(0))  # so that no request is left over


class Requests:
    """A pipe with two requests for a state, of which the first fails."""

    def __init__(self):
        self.given, self.answers, self.is_held = None, [], []

    def recv(self):
        self.is_held.append(self.given is not None and self.given() is not None)
        if len(self.is_held) > 2:
            return None
        (answer := Future()).add_done_callback(self.note)
        return answer

    def state(self):
        if len(self.is_held) == 1:
            raise KeyError("not finite")
        self.given = weakref.ref(given := {1})
        return given

    def note(self, answer):
        self.answers.append(repr(answer.exception()) if answer.exception() else len(answer.result()))


def test_state_request_is_answered_and_released(caplog):
    requests = Requests()
    answer_requests(requests, requests.state)
    assert requests.answers == ["KeyError('not finite')", 1]
    assert "not copied" in caplog.text
    assert requests.is_held == [False] * 3
