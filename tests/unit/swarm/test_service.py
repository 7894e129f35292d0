"""Services work in the DHT's process; their handles command them from the training process."""

import asyncio
import socket
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError, Future
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hivemind.averaging.partition import AllreduceException

from tests.kit.identities import key_of
from tests.unit.async_tests import with_sockets
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

    def host(work):
        ours, theirs = Pipe.pair()
        hosted.append(threading.Thread(target=work, args=[dht, theirs], daemon=True))
        hosted[-1].start()
        return ours

    hosted = []
    p2p = AsyncMock(peer_id=None, daemon_listen_maddr="")
    p2p.replicate.return_value = p2p
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


def handle_of(dht, **options):
    return ServiceHandle(dht, Echo("run", is_client=True), **options)


@pytest.fixture
def handle(dht):
    handle = handle_of(dht)
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
    handle = handle_of(dht, give=lambda: "a copy")
    assert handle.request("ask").result(LIMIT_S) == "a copy"
    handle.shutdown(LIMIT_S)


@pytest.mark.parametrize("is_running", [True, False])
def test_service_that_does_not_start_fails(monkeypatch, is_running):
    monkeypatch.setattr(module, "require_start", partial(require_start, timeout_s=0.1))
    with pytest.raises(SwarmError, match="while it started"):
        handle_of(Mock(is_alive=lambda: is_running))


def test_start_error_reaches_training_process(dht, monkeypatch):
    monkeypatch.setattr(Echo, "start", AsyncMock(side_effect=OSError("no p2pd")))
    with pytest.raises(OSError, match="no p2pd"):
        handle_of(dht)


@with_sockets
async def test_node_life_needs_service_loops(dht):
    handle = handle_of(dht)
    is_busy, may_go_on = threading.Event(), threading.Event()
    [loop] = dht.loops
    loop.call_soon_threadsafe(lambda: [is_busy.set(), may_go_on.wait()])
    is_busy.wait()
    life = asyncio.create_task(show_life(dht, dht._node))
    await asyncio.wait([life], timeout=0.05)
    assert not life.done()
    may_go_on.set()
    await asyncio.wait_for(life, LIMIT_S)
    handle.shutdown(LIMIT_S)
    await asyncio.wait_for(show_life(dht, dht._node), LIMIT_S)


def test_life_of_ended_service_thread_fails(dht):
    dht.loops.append(asyncio.new_event_loop())  # its thread has ended without a shutdown of its service
    with pytest.raises(RuntimeError, match="has ended"):
        asyncio.run(show_life(dht, dht._node))
    dht.loops[0].run_until_complete(asyncio.sleep(0))  # so that no request is left over


def test_failed_state_request_is_answered(caplog):
    asked = Future()
    answer_requests(Mock(recv=Mock(side_effect=[asked, None])), Mock(side_effect=KeyError("not finite")))
    assert repr(asked.exception()) == "KeyError('not finite')"
    assert "not copied" in caplog.text


def test_answered_state_is_released():
    def make():
        state = {1}
        made.append(weakref.ref(state))
        return state

    def requests():
        yield Future()
        left.append(made[0]())
        yield None

    made, left = [], []
    answer_requests(Mock(recv=requests().__next__), make)
    assert left == [None]
