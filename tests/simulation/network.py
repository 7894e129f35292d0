"""A network in memory, on a clock that jumps: what stands in the place of p2pd, sockets and waiting.

Everything above it is the product's own: the guarded P2P, its handlers and stubs, and what they carry. Each
message travels as bytes, so that peers share nothing.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID

from trahiv_cli.swarm.door import Door, GuardedP2P


class WaitsForEver(RuntimeError):
    """Nothing can happen any more, and somebody still waits."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing: it sets the clock to when the next thing is due."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        """See `selectors`."""
        if timeout is None:
            raise WaitsForEver
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time, and in which work for other threads is done at once."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since it was made."""
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the clock of all timers."""
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Do the work now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Message:
    """Something that travels."""

    sender: PeerID
    receiver: PeerID
    call: str
    """Name of the method that is called, as `rpc_vote`."""
    is_answer: bool
    content: bytes


class Network:
    """Carries bytes between the daemons that it knows."""

    def __init__(self) -> None:
        self.daemons: dict[PeerID, Daemon] = {}
        self.tamper: Callable[[Message], list[bytes]] = lambda message: [message.content]
        """What comes of a message: itself, nothing, something else, or more than one."""

    def p2p_of(self, peer: PeerID) -> P2P:
        """Make what a process of a peer speaks with the others by."""
        p2p = GuardedP2P.behind(Door())()
        p2p.peer_id = peer
        p2p._client = self.daemons[peer] = Daemon(self, peer)
        p2p._listen_task = p2p._reader_task = p2p._daemon_listen_maddr = p2p._client_listen_maddr = None
        p2p._start_listening = lambda: None
        return p2p


class Daemon:
    """One peer's p2pd, as `hivemind.p2p.p2p_daemon_bindings.p2pclient.Client` shows it."""

    def __init__(self, network: Network, peer: PeerID) -> None:
        self._network, self._peer = network, peer
        self._unary: dict[str, Callable[[bytes, PeerID], Awaitable[bytes]]] = {}
        self._streams: dict[str, Callable[..., Awaitable[None]]] = {}

    async def add_unary_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Serve calls of one message and one answer."""
        self._unary[name] = handler

    async def stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Serve streams."""
        self._streams[name] = handler

    async def call_unary_handler(self, peer: PeerID, name: str, content: bytes) -> bytes:
        """Call another peer's handler."""
        await asyncio.sleep(0)
        there, call = self._network.daemons.get(peer), name.rpartition(".")[2]
        if there is None:
            raise P2PDaemonError("no route")
        arrived = self._network.tamper(Message(self._peer, peer, call, False, content))
        if not arrived:  # it is on its way for ever
            await asyncio.get_running_loop().create_future()
        answer = b""
        for one in arrived:
            try:
                answer = await there._unary[name](one, self._peer)
            except Exception as error:
                raise P2PHandlerError(str(error)) from error
        returned = self._network.tamper(Message(peer, self._peer, call, True, answer))
        if not returned:
            await asyncio.get_running_loop().create_future()
        return returned[0]

    async def stream_open(self, peer: PeerID, names: tuple[str]) -> tuple[Any, Any, Any]:
        """Open a stream to another peer's handler."""
        await asyncio.sleep(0)
        there, call = self._network.daemons.get(peer), names[0].rpartition(".")[2]
        if there is None:
            raise P2PDaemonError("no route")
        ours, theirs = asyncio.StreamReader(), asyncio.StreamReader()

        def carry(sender: PeerID, receiver: PeerID, is_answer: bool) -> Callable[[bytes], list[bytes]]:
            return lambda content: self._network.tamper(Message(sender, receiver, call, is_answer, content))

        asking = Writer(theirs, carry(self._peer, peer, False))
        answering = Writer(ours, carry(peer, self._peer, True))
        info = SimpleNamespace(peer_id=self._peer)
        serving = asyncio.create_task(there._streams[names[0]](info, theirs, answering))
        asking.serving = serving  # or it would be collected
        return SimpleNamespace(peer_id=peer), ours, asking

    def close(self) -> None:
        """Close nothing: there is no socket."""


class Writer:
    """One direction of a stream: what hivemind writes piece by piece arrives by messages."""

    serving: asyncio.Task[None] | None = None

    def __init__(self, reader: asyncio.StreamReader, carry: Callable[[bytes], list[bytes]]) -> None:
        self._reader, self._carry = reader, carry
        self._written = bytearray()
        self._is_closed = False

    def write(self, content: bytes | memoryview) -> None:
        """Take what may be a part of a message."""
        self._written += content
        head = 1 + P2P.HEADER_LEN
        while len(self._written) >= head:
            size = int.from_bytes(self._written[1:head], P2P.BYTEORDER)
            if len(self._written) < head + size:
                return
            marker, message = self._written[:1], bytes(self._written[head : head + size])
            del self._written[: head + size]
            is_plain = marker == P2P.MESSAGE_MARKER
            for one in self._carry(message) if is_plain else [message]:
                if not self._is_closed:
                    self._reader.feed_data(marker + len(one).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER) + one)

    async def drain(self) -> None:
        """Let others go on."""
        await asyncio.sleep(0)

    def close(self) -> None:
        """Say that nothing comes any more."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.feed_eof()
