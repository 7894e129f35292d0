"""A network in memory, on a clock that jumps: what stands in the place of p2pd, sockets and waiting.

Everything above it is the product's own: the guarded P2P, its handlers and stubs, and what they carry. Each
message travels as bytes, so that peers share nothing.
"""

import asyncio
import contextvars
import selectors
import sys
from collections import deque
from dataclasses import dataclass, replace
from types import SimpleNamespace

from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID

from trahiv_cli.members.door import Door

DIAL_S = 5.0  # within this time p2pd says that somebody can't be reached
LOOK_S = 0.25  # how often what was held up looks whether it can go on
TURN_S = 1e-9
"""What each turn of the loop takes: in no time at all, who waits for a moment that is as good as over would
look for ever whether it is."""


def with_the_swarm_s_time():
    """List the modules of hivemind that have `get_dht_time`, which each of them imports by name."""
    modules = list(sys.modules.items())
    ours = [module for name, module in modules if name.partition(".")[0] == "hivemind"]
    return [module for module in ours if hasattr(module, "get_dht_time")]


class _Jump(selectors.SelectSelector):
    """Waits for nothing: it sets the clock of its `loop` to when the next thing is due."""

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("nothing can happen any more, and somebody still waits")
        self.loop.now += TURN_S
        if timeout > TURN_S:
            self.loop.now = self.loop._scheduled[0].when()  # `now + timeout` would round
        return ()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time, and in which work for other threads is done at once."""

    def __init__(self):
        self.now = 0.0  # seconds since it was made
        self.execute = lambda work: work()
        """Does the work of executors."""
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now

    def run_in_executor(self, executor, func, *args):
        future = self.create_future()

        def work():
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - as an executor does
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.execute(work)
        return future


def run_virtually(coroutine):
    """Run a coroutine in a loop of its own in which waiting takes no time; return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


@dataclass(frozen=True)
class Message:
    """Something that travels."""

    sender: PeerID
    receiver: PeerID
    call: str
    """Name of the method that is called, as `rpc_vote`."""
    is_answer: bool
    content: bytes


def altered(sender, call, is_answer, edit):
    """Return a `Network.tamper` that edits the contents of one sender's messages of one kind."""

    def tamper(message):
        is_meant = (message.sender, message.call, message.is_answer) == (sender, call, is_answer)
        return edit(message.content) if is_meant else [message.content]

    return tamper


def edited(kind, change):
    """Return an edit that changes a message of protobuf."""
    return lambda content: [change(kind.FromString(content)).SerializeToString()]


class Network:
    """Carries bytes between the daemons that it knows."""

    def __init__(self):
        self.daemons = {}
        """Of each peer: each of its processes has one."""
        self.tamper = lambda message: [message.content]
        """Returns the contents that arrive in place of a message; None: no more of its stream arrives."""
        self.delay_s = lambda sender, receiver: 0.0
        self.is_cut = lambda one, other: False
        """Whether nothing gets through between two peers now; what is on its way arrives afterwards."""
        self.are_connected = lambda one, other: True
        """Whether two peers have a connection, or can dial each other."""

    def p2p_of(self, peer, door=None):
        """Make what a process of a peer speaks with the others by; by default in an open swarm."""
        p2p = (door or Door()).guarded()()
        p2p.peer_id = peer
        p2p._client = daemon = Daemon(self, peer)
        self.daemons.setdefault(peer, []).append(daemon)
        p2p._listen_task = p2p._reader_task = p2p._daemon_listen_maddr = p2p._client_listen_maddr = None
        p2p._start_listening = lambda: None
        return p2p

    def remove(self, peer):
        """Have a peer vanish: whoever speaks with it finds the connection reset."""
        for daemon in self.daemons.pop(peer, ()):
            for call in tuple(daemon.calls):
                call.cancel()
            for line in tuple(daemon.lines):
                line.close()

    async def find(self, caller, peer, name):
        """Dial a peer, and return its daemon that serves a call; else raise `P2PDaemonError`."""
        await asyncio.sleep(self.delay_s(caller, peer))
        if self.is_cut(caller, peer):
            await asyncio.sleep(DIAL_S)
        for daemon in self.daemons.get(peer, ()) if self.are_connected(caller, peer) else ():
            if name in daemon.handlers and not self.is_cut(caller, peer):
                return daemon
        raise P2PDaemonError("no route")


class Daemon:
    """One peer's p2pd, as `hivemind.p2p.p2p_daemon_bindings.p2pclient.Client` shows it."""

    def __init__(self, network, peer):
        self._network = network
        self._peer = peer
        self.handlers = {}
        self._context = contextvars.copy_context()
        # In the order in which they came: a set's is another one in each run.
        self.calls = {}
        self.lines = {}

    async def add_unary_handler(self, name, handler, balanced=False):
        self.handlers[name] = handler

    stream_handler = add_unary_handler

    def _begin(self, work):
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self.calls[task] = None
        task.add_done_callback(self.calls.pop)
        return task

    async def call_unary_handler(self, peer, name, content):
        network = self._network
        call = name.rpartition(".")[2]
        there = await network.find(self._peer, peer, name)
        arrived = network.tamper(Message(self._peer, peer, call, False, content))
        if not arrived:  # it is on its way for ever
            await asyncio.get_running_loop().create_future()
        answer = b""
        for one in arrived:
            serving = there._begin(there.handlers[name](one, self._peer))
            try:
                answer = await serving
            except asyncio.CancelledError:
                if serving.cancelled():
                    raise P2PDaemonError("the connection was reset") from None
                serving.cancel()
                raise
            except Exception as error:
                raise P2PHandlerError(str(error)) from error
        while network.is_cut(self._peer, peer):
            await asyncio.sleep(LOOK_S)
        if (delay_s := network.delay_s(peer, self._peer)) > 0:
            await asyncio.sleep(delay_s)
        returned = network.tamper(Message(peer, self._peer, call, True, answer))
        if not returned:
            await asyncio.get_running_loop().create_future()
        return returned[0]

    async def stream_open(self, peer, names):
        [name], network = names, self._network
        there = await network.find(self._peer, peer, name)
        ours = asyncio.StreamReader()
        theirs = asyncio.StreamReader()
        ends = (self, there)
        asked = Message(self._peer, peer, name.rpartition(".")[2], False, b"")
        asking = Writer(network, asked, theirs, ends)
        answered = replace(asked, sender=peer, receiver=self._peer, is_answer=True)
        answering = Writer(network, answered, ours, ends)
        there._begin(there.handlers[name](SimpleNamespace(peer_id=self._peer), theirs, answering))
        return SimpleNamespace(peer_id=peer), ours, asking

    async def list_peers(self):
        """List the peers that this one is connected with."""
        network = self._network
        there = [peer for peer in network.daemons if peer != self._peer]
        known = [peer for peer in there if network.are_connected(self._peer, peer)]
        return [SimpleNamespace(peer_id=peer, addrs=[]) for peer in known]

    def close(self):
        """Close nothing: there is no socket."""


class Writer:
    """One direction of a stream: what hivemind writes piece by piece arrives by messages.

    Args:
        network: that it goes through.
        empty: a message of those that travel, without content.
        reader: at the other end.
        ends: the daemons of both; each resets it.
    """

    def __init__(self, network, empty, reader, ends):
        self._network = network
        self._empty = empty
        self._reader = reader
        self._ends = ends
        self._written = bytearray()
        self._on_the_way = deque()
        self._is_closed = self._is_silent = False
        for end in ends:
            end.lines[self] = None

    def write(self, content):
        """Take what may be a part of a message."""
        self._written += content
        head = 1 + P2P.HEADER_LEN
        while len(self._written) >= head:
            size = int.from_bytes(self._written[1:head], P2P.BYTEORDER)
            if len(self._written) < head + size:
                return
            marker = self._written[:1]
            message = bytes(self._written[head : head + size])
            del self._written[: head + size]
            is_plain = marker == P2P.MESSAGE_MARKER
            sent = self._network.tamper(replace(self._empty, content=message)) if is_plain else [message]
            self._is_silent |= sent is None
            for one in sent or ():
                self._send(bytes(marker) + len(one).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + one)

    def _send(self, piece):
        """Send a piece, or the end, behind what is on its way already."""
        if self._is_silent or (self._is_closed and piece is not None):
            return
        delay_s = self._network.delay_s(self._empty.sender, self._empty.receiver)
        self._on_the_way.append(piece)
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._arrive)
        else:
            self._arrive()

    def _arrive(self):
        if self._network.is_cut(self._empty.sender, self._empty.receiver):
            asyncio.get_running_loop().call_later(LOOK_S, self._arrive)
            return
        piece = self._on_the_way.popleft()
        if piece is None:
            self._reader.feed_eof()
        else:
            self._reader.feed_data(piece)

    async def drain(self):
        await asyncio.sleep(0)  # others go on

    def close(self):
        if not self._is_closed:
            self._is_closed = True
            for end in self._ends:
                end.lines.pop(self, None)
            self._send(None)
