"""Access control of a closed swarm: a peer answers and calls members only.

1. Every call between peers (DHT, matchmaking, averaging, state, recipe, metrics) passes `GuardedP2P`, which
   asks the `Door` of its process.
2. A caller sends its certificate (`membership`) before each request and at the head of each stream. The
   callee checks it before it parses a byte of the request, so it needs no list of callers.
3. Before its first call to a peer, a caller asks for that peer's certificate as well (`INTRODUCE`).

A service is one of hivemind's servicers: the part of a handler's name before the last dot.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PContext, P2PHandlerError, PeerID
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.utils import get_logger

from trahiv_cli.errors import NotAdmitted
from trahiv_cli.members.membership import (
    CERTIFICATE_BYTES,
    GRANT_BYTES,
    KEY_BYTES,
    TAKEN_OUT,
    UNSIGNED,
    USED,
    Grant,
    Membership,
    Role,
    certified,
)
from trahiv_cli.members.policy_book import PolicyBook
from trahiv_cli.net.streams import and_end, caller_is_gone, until_end

logger = get_logger(__name__)

INTRODUCE = "introduce"  # a handler of each service: it takes a caller's certificate and answers its own

# Handlers that a watcher may call.
WATCHED = frozenset({INTRODUCE, "rpc_ping", "rpc_find", "rpc_compare"})
# Handlers that do not use up a single-use invitation: peers call them under a temporary id before they join,
# and so does `trahiv doctor`.
LOOKED = WATCHED | {"rpc_look", "rpc_measure", "rpc_seek", "rpc_answer"}

GIVING = frozenset({"rpc_send_state", "rpc_replay", "rpc_measure"})  # handlers that send many bytes
REFUSAL = "trahiv: not a member of this swarm"  # the answer to a stranger


@dataclass(frozen=True)
class CallLimits:
    """Limits of a process on the calls and streams of one peer, or of all strangers together."""

    # In a round, a peer makes four calls to another one; checking a certificate takes 0.26 ms.
    calls_a_second: float = 300.0
    calls_at_once: int = 3000
    # A call counts once more for each `call_bytes` of its request: checking a signed record takes 0.3 ms, and
    # records are hardly shorter than this.
    call_bytes: int = 1024
    # A round needs two streams, a download one. Each stream is an open file; a stranger's may stay open for
    # `introduction_s`.
    streams_at_once: int = 64
    given_at_once: int = 4  # to each handler in `GIVING`: streams of an aborted download may not have ended
    introduction_s: float = 10.0  # for a peer to answer `INTRODUCE`, and to present a certificate in a stream
    linger_s: float = 3.0  # for callers that don't close their stream
    peers_remembered: int = 4096
    strangers_named: int = 64  # in the log: ids are free, and the log must not fill the disk


class Refused(PermissionError):
    """A call that this peer refuses to answer."""


class NotAMember(Refused):
    """The caller is not a member; the error carries the owner's policy if that is the reason."""

    def __init__(self, why: str, policy: bytes = b"") -> None:
        signed = f" [policy {base64.b64encode(policy).decode()}]" if policy else ""
        super().__init__(f"{REFUSAL}: {why}{signed}")


def not_admitted(objection: str) -> NotAdmitted:
    """Return an error that explains an objection to this peer's user; empty: it is of another swarm."""
    if objection == TAKEN_OUT:
        return NotAdmitted(
            "The owner of this swarm has taken this peer out. Its training is kept, and sent to no peer.",
            hint="ask the owner for a new invitation, and join from another folder: --output-dir DIR",
        )
    return NotAdmitted(
        f"The swarm does not take this peer for a member: {objection or 'its invitation is to another one'}.",
        hint="ask the owner, or a member, for a fresh invitation; to join another swarm than before, give "
        "this peer another folder: --output-dir DIR",
    )


class Door:
    """Decides which peers an event loop of this peer talks to; without a membership, all peers.

    `Node` makes the first one, and each event loop of the DHT's process has its own.
    """

    def __init__(
        self,
        membership: Membership | None = None,
        book: PolicyBook | None = None,
        own: bytes = b"",
        limits: CallLimits = CallLimits(),  # noqa: B008
    ) -> None:
        self._membership = membership
        self.limits = limits
        self._own = own  # the id of this peer
        self._book = book or PolicyBook(membership.owner if membership else b"")
        self.certificate = membership.certify(own) if membership else b""  # sent before each request
        self.is_open = membership is None
        self.owner = membership.owner if membership else None  # public key of the closed swarm's owner
        self._known: OrderedDict[PeerID, bytes] = OrderedDict()  # valid certificates
        self._introductions: dict[PeerID, asyncio.Task[bytes]] = {}
        # Grants that the owner signed and that peers have presented here, and this peer's own.
        self._grants = {membership.grant.to_bytes()} if membership else set()
        self._came_by: dict[bytes, PeerID] = {}  # the first peer that came with each single-use invitation
        self._named: set[tuple[PeerID, str]] = set()
        self._calls_left: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # calls left, and when
        # Open streams: by account and handler for the handlers in `GIVING`; by account and "" for all.
        self._streams: Counter[tuple[bytes, str]] = Counter()
        self._why_refused = ""
        # Whether a peer has answered that this one is not a member, or that its own swarm is open.
        self.was_refused = False

    def another(self) -> Door:
        """Make a door to the same swarm for another event loop."""
        return Door(self._membership, self._book, self._own, self.limits)

    def guarded(self) -> type[GuardedP2P]:
        """Return a class of P2P instances behind this door."""
        return type(GuardedP2P.__name__, (GuardedP2P,), {"door": self})

    # -- checking callers --------------------------------------------------------------------------

    def admit(self, peer: PeerID, certificate: bytes, handler: str) -> None:
        """Check the certificate that a peer, whose id libp2p has proven, presents when it calls a handler.

        Raises NotAMember if it is not that peer's certificate in this swarm, if the policy excludes the peer,
        or if its role may not call this handler.
        """
        if self._membership is None:
            return
        id_ = peer.to_bytes()
        name = handler.rpartition(".")[2]
        grant = certified(self._membership.owner, id_, certificate)
        policy = self._book.policy
        if grant is None:
            self._refuse(peer, "it is not a member of this swarm")
        self._grants.add(certificate[:GRANT_BYTES])
        if grant.role is Role.watcher and name not in WATCHED:
            self._refuse(peer, "it may only watch")
        if objection := policy.objection(id_, grant):
            self._refuse(peer, objection, self._book.wire)
        if grant.is_once and name not in LOOKED and self._came_by.setdefault(grant.key, peer) != peer:
            # Until the owner's policy decides which peer stays, only the first one may enter.
            if not policy.keeps(id_, grant):
                self._refuse(peer, USED)
            self._came_by[grant.key] = peer
        self._known[peer] = certificate
        self._known.move_to_end(peer)
        if len(self._known) > self.limits.peers_remembered:
            # Made-up ids of one invitation displace none of another.
            [(key, _)] = Counter(known[:KEY_BYTES] for known in self._known.values()).most_common(1)
            del self._known[next(one for one, known in self._known.items() if known[:KEY_BYTES] == key)]

    def admit_request(self, peer: PeerID, request: bytes, handler: str) -> bytes:
        """Count a request and check the certificate at its head; return the request without it."""
        self.count(peer, request[:CERTIFICATE_BYTES], len(request))
        self.admit(peer, request[:CERTIFICATE_BYTES], handler)
        return request if self.is_open else request[CERTIFICATE_BYTES:]

    def _refuse(self, peer: PeerID, why: str, policy: bytes = b"") -> NoReturn:
        self._known.pop(peer, None)
        self._name(peer, why)
        raise NotAMember(why, policy)

    def _name(self, peer: PeerID, why: str) -> None:
        if (peer, why) not in self._named and len(self._named) < self.limits.strangers_named:
            self._named.add((peer, why))
            logger.warning(f"Peer {peer} was refused: {why}.")

    # -- limits on calls and streams ---------------------------------------------------------------

    def _account(self, peer: PeerID, certificate: bytes = b"") -> bytes:
        """Return the account of a call: a known peer's, its invitation's, or b"", the one of all strangers.

        A peer that shows a known grant of the owner is no stranger, even before its certificate is checked.
        """
        if self.is_open or peer in self._known:
            return peer.to_bytes()
        grant = certificate[:GRANT_BYTES]
        return grant if grant in self._grants else b""

    def count(self, peer: PeerID, certificate: bytes = b"", num_bytes: int = 0) -> None:
        """Count a call before its certificate is checked; raise Refused if there are too many."""
        now = time.monotonic()
        account = self._account(peer, certificate)
        limits = self.limits
        left, then = self._calls_left.pop(account, (float(limits.calls_at_once), now))
        left = min(limits.calls_at_once, left + (now - then) * limits.calls_a_second)
        cost = 1 + num_bytes // limits.call_bytes
        self._calls_left[account] = max(0.0, left - cost), now
        while len(self._calls_left) > limits.peers_remembered:
            self._calls_left.popitem(last=False)
        if left < cost:
            self._refuse_more(peer, account, "it calls too often", "calls")

    @contextlib.contextmanager
    def stream(self, peer: PeerID, handler: str) -> Iterator[None]:
        """Count a peer's stream to a handler as open within the block; raise Refused if it has too many."""
        account = self._account(peer)
        limits = {(account, ""): self.limits.streams_at_once}
        if (called := handler.rpartition(".")[2]) in GIVING:
            limits[account, called] = self.limits.given_at_once
        if any(self._streams[counted] >= most for counted, most in limits.items()):
            self._refuse_more(peer, account, "it has too many streams open", "streams")
        self._streams.update(limits.keys())
        try:
            yield
        finally:
            self._streams.subtract(limits.keys())
            self._streams += Counter()  # removes counts of 0

    def _refuse_more(self, peer: PeerID, account: bytes, why: str, what: str) -> NoReturn:
        if account:  # a stranger may have called only once
            self._name(peer, why)
        raise Refused(f"trahiv: too many {what}")

    # -- calling other peers -----------------------------------------------------------------------

    def learn_from(self, refusal: str) -> None:
        """Note the reason in a peer's refusal of a call, and keep the owner's policy if it carries one."""
        if REFUSAL not in refusal:
            return
        self.was_refused = True
        self._why_refused = next((why for why in UNSIGNED if why in refusal), "")
        if found := re.search(r"\[policy ([A-Za-z0-9+/=]+)\]", refusal):
            with contextlib.suppress(ValueError, OSError):  # not base64, or the disk is full
                self._book.offer(base64.b64decode(found[1], validate=True))

    def why_refused(self) -> NotAdmitted:
        """Return the error that tells this peer's user why all peers that answered refused it."""
        if self._membership is None:
            return NotAdmitted(
                "The swarm is closed: it answers members alone.",
                hint="ask a member for its invitation, and type: trahiv join --peer trahiv1:...",
            )
        signed = self._book.policy.objection(self._own, self._membership.grant)
        return not_admitted(signed or self._why_refused)

    async def introduce(self, p2p: GuardedP2P, peer: PeerID, handler: str) -> None:
        """Check that another peer is a member before calling one of its handlers.

        Raises P2PHandlerError if it is not, or if it only watches.
        """
        if self.is_open:
            return
        if (certificate := self._known.get(peer)) is None:
            if (task := self._introductions.get(peer)) is None:
                task = asyncio.create_task(self._introduced(p2p, peer, handler.rpartition(".")[0]))
                self._introductions[peer] = task
                # Retrieve the exception: possibly no caller awaits the task any more.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            certificate = await asyncio.shield(task)  # after a timeout, the next call finds the result
        if Grant.parse(certificate[:GRANT_BYTES]).role is Role.watcher:  # it serves nothing
            raise P2PHandlerError(f"peer {peer} is not called: it only watches")
        try:
            self.admit(peer, certificate, handler)
        except NotAMember as error:
            raise P2PHandlerError(f"peer {peer} is not called: {error}") from error

    async def _introduced(self, p2p: GuardedP2P, peer: PeerID, service: str) -> bytes:
        try:
            async with asyncio.timeout(self.limits.introduction_s):
                answer = await p2p.call_unary(peer, f"{service}.{INTRODUCE}", b"")
            if not answer:
                self.was_refused = True
                self._why_refused = "it is open, and this peer belongs to a closed one"
            self.admit(peer, answer, INTRODUCE)
            return answer
        except (TimeoutError, NotAMember) as error:
            raise P2PHandlerError(f"peer {peer} did not introduce itself: {error!r}") from error
        finally:
            del self._introductions[peer]


class HandlersWriter:
    """The writer of a stream as its handler sees it: the caller must read in time, and closing does nothing.

    Handlers close their stream right after sending, when the last bytes may still be lost.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    async def drain(self) -> None:
        """Wait for the caller to read; TimeoutError if it reads nothing for a minute."""
        async with asyncio.timeout(60.0):
            await self._writer.drain()

    def close(self) -> None:
        """Leave the stream open."""


class GuardedP2P(P2P):
    """A `P2P` whose handlers and calls are for members only; a subclass has the `door` of its process."""

    door: Door

    def __init__(self) -> None:
        super().__init__()
        self._services: set[str] = set()

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[..., Any], input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        await self._receive(handle_name)

        async def guarded(request: bytes, context: P2PContext) -> Any:
            content = self.door.admit_request(context.remote_id, request, handle_name)
            return await handler(input_protobuf_type.FromString(content), context)

        unparsed = SimpleNamespace(FromString=bytes)  # a request is parsed only after the check
        await super()._add_protobuf_unary_handler(handle_name, guarded, unparsed, balanced)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        """Add a stream handler; see `P2P`. Of a stranger's stream it reads only the certificate."""
        await self._receive(name)

        async def guarded(stream_info: Any, reader: asyncio.StreamReader, writer: Any) -> None:
            limits = self.door.limits
            handed = HandlersWriter(writer)
            peer = stream_info.peer_id
            with contextlib.ExitStack() as stack, contextlib.closing(writer):
                try:
                    certificate = b""
                    with self.door.stream(peer, INTRODUCE):
                        if not self.door.is_open:
                            async with asyncio.timeout(limits.introduction_s):
                                certificate = await reader.readexactly(CERTIFICATE_BYTES)
                        self.door.admit_request(peer, certificate, name)
                    stack.enter_context(self.door.stream(peer, name))
                except (Refused, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                    with contextlib.suppress(OSError):
                        words = str(error if isinstance(error, Refused) else NotAMember("no certificate"))
                        await P2P.send_protobuf(RPCError(message=words), handed)
                    return
                await handler(stream_info, reader, handed)
                await caller_is_gone(reader, limits.linger_s)

        await super().add_binary_stream_handler(name, guarded, balanced)

    async def _add_protobuf_stream_handler(
        self, name: str, handler: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        def to_the_end(requests: Any, context: P2PContext) -> Any:
            return and_end(handler(requests, context))

        await super()._add_protobuf_stream_handler(name, to_the_end, *args, **kwargs)

    async def _iterate_protobuf_stream_handler(self, *args: Any) -> Any:
        return until_end(await super()._iterate_protobuf_stream_handler(*args))

    async def _receive(self, handle_name: str) -> None:
        """Add the handler `INTRODUCE` to the service of a handler, once."""
        service = handle_name.rpartition(".")[0]
        if service in self._services:
            return
        self._services.add(service)

        async def answer(certificate: bytes, remote_id: PeerID) -> bytes:
            self.door.admit_request(remote_id, certificate, INTRODUCE)
            return self.door.certificate

        await self._client.add_unary_handler(f"{service}.{INTRODUCE}", answer)

    async def call_unary(self, peer_id: PeerID, handle_name: str, request: bytes) -> bytes:
        """Call a handler with bytes, behind this peer's certificate, without checking the callee."""
        try:
            request = self.door.certificate + request
            return bytes(await self._client.call_unary_handler(peer_id, handle_name, request))
        except P2PHandlerError as error:
            self.door.learn_from(str(error))
            raise

    async def _call_unary_protobuf_handler(
        self, peer_id: PeerID, handle_name: str, input: Any, output_protobuf_type: type[Any]
    ) -> Any:
        await self.door.introduce(self, peer_id, handle_name)
        response = await self.call_unary(peer_id, handle_name, input.SerializeToString())
        try:
            return output_protobuf_type.FromString(response)
        except DecodeError as error:  # callers do not expect protobuf's errors
            raise P2PHandlerError(f"peer {peer_id} gave an answer that can't be read: {error}") from error

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        """Open a stream to a member; see `P2P`. Raises the errors of `Door.introduce` as well."""
        await self.door.introduce(self, peer_id, handler_name)
        stream_info, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)
        writer.write(self.door.certificate)
        return stream_info, reader, writer
