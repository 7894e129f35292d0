"""Every member keeps every record of its swarm: a member that stores one sends it to all others.

hivemind stores a record at the five nodes nearest to its key, and a node chooses its id: five nodes of one
member could hide everything under a key. From twenty nodes on, each store searches all of them.

1. A node keeps each of its records and sends it to each connected peer (`put`). It reads from its own copies.
2. Peers compare their records when they connect, and then in rotation. Each asks for the records that it
   lacks. So a record also reaches members that its owner is not connected with.
3. A missing record proves nothing. A node asks the owner for a new one before the old one ends: `read` leaves
   an owner out only if it did not answer.

All of it runs in the event loop of the DHT's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.proto.dht_pb2 import StoreRequest

from trahiv_cli.clock import swarm_time
from trahiv_cli.members.records import owner_of
from trahiv_cli.net.links import close_dead
from trahiv_cli.wire import packed

COMPARE_EVERY_S = 5.0  # between comparisons in rotation, and between tries with a silent peer
# A new member compares with this number of peers every second, for this time: the first step of a run begins
# once each peer knows all others, and a peer behind a router is connected with few of them.
NEW_COMPARES, NEW_S = 3, 30.0
# A node asks an owner for a new record when its last one ends within this time: by then the owner should have
# published another one.
ENDS_SOON_S = 6.0
# The most bytes of records in one message: an uplink of 5 Mbit/s sends them in the 3 s that hivemind waits
# for an answer. `Copies.lacking` limits the average for each peer.
MAX_ANSWER_BYTES = 3 * 2**19


class Record(NamedTuple):
    """A signed record, as it is kept and sent."""

    key: DHTID
    place: bytes  # of its owner
    value: bytes
    ends_at: float  # in the swarm's time

    @property
    def digest(self) -> bytes:
        """Hash of this version of the record, which two peers compare."""
        version = packed([self.key.to_bytes(), self.place, self.ends_at])
        return hashlib.sha256(version).digest()[:8]


def _owners(places: Iterable[bytes]) -> set[PeerID]:
    return {PeerID.from_base58(owner) for place in places if (owner := owner_of(place))}


class _Outbox(NamedTuple):
    """The newest versions of the records that wait to be sent to one peer, and whether it has taken them."""

    waiting: dict[tuple[DHTID, bytes], Record]
    is_sent: asyncio.Future[bool]


class Copies:
    """Keeps, sends and compares the records of a node; its `CorrectedProtocol` creates one.

    Args:
        protocol: this `CorrectedProtocol`, which calls other nodes and serves them.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._outboxes: dict[PeerID, _Outbox] = {}
        self._silent: set[PeerID] = set()  # peers that did not answer: they get nothing until they do
        self._connected: tuple[PeerID, ...] = ()
        self._asked: dict[PeerID, float] = {}  # when this node last asked each peer for records
        self._answered: dict[PeerID, float] = {}  # when each connected peer answered, since it connected
        self._known: set[PeerID] = set()  # peers that have answered, and are connected or have had records
        self._asking: dict[PeerID, asyncio.Task[None]] = {}
        self._may_ask_at: dict[PeerID, float] = {}  # when each may have others' records from this node again
        # When the records under each key end, by place, as of the last read.
        self._read: dict[DHTID, dict[bytes, float]] = {}
        self._is_member = False  # this node has stored a record of its own
        self._tasks: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        """End all tasks."""
        for task in tuple(self._tasks):
            task.cancel()

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- this node's records -------------------------------------------------------------------------

    def _kept(self) -> Iterator[Record]:
        for key, (entries, _) in list(self._protocol.storage.items()):
            if isinstance(entries, DictionaryDHTValue):
                for place, (value, ends_at) in entries.items():
                    yield Record(key, place, value, ends_at)

    def _ends(self, key: DHTID) -> dict[bytes, float]:
        return {record.place: record.ends_at for record in self._kept() if record.key == key}

    async def put(self, key: DHTID, place: bytes, value: bytes, ends_at: float) -> bool:
        """Sign and keep a record (MessagePack), and send it to all connected peers, waiting for each.

        Return whether it is kept: False if other nodes would refuse it, or this one has a later version.
        """
        if not self._is_member:
            self._is_member = True
            self._start(self._run())
            await self._protocol.serve_always()
        parts = key.to_bytes(), packed(place)
        signed = self._protocol.record_validator.sign_value(DHTRecord(*parts, value, ends_at))
        is_valid = self._protocol._validate_record(*parts, signed, ends_at)
        if not (is_valid and self._protocol.storage.store_subkey(key, place, signed, ends_at)):
            return False
        await self._look_who_is_connected()
        record = Record(key, place, signed, ends_at)
        if sent := [self._send(peer, record) for peer in self._connected if peer not in self._silent]:
            await asyncio.wait(sent, timeout=self._protocol.wait_timeout)
        return True

    def _send(self, peer: PeerID, record: Record) -> asyncio.Future[bool]:
        """Send a record soon; return a future: whether the peer has taken it, or a later version."""
        if peer not in self._outboxes:
            self._outboxes[peer] = _Outbox({}, asyncio.Future())
            self._start(self._empty(peer))
        waiting, is_sent = self._outboxes[peer]
        waiting[record.key, record.place] = record
        return is_sent

    async def _empty(self, peer: PeerID) -> None:
        """Send the records in an outbox until there are none, or the peer takes none."""
        sending = self._outboxes[peer]
        try:
            while sending.waiting:
                self._outboxes[peer] = _Outbox({}, asyncio.Future())
                keys, places, values, ends = zip(*sending.waiting.values(), strict=True)
                does_answer = await self._protocol.call_store(peer, keys, values, ends, places) is not None
                sending.is_sent.set_result(does_answer)
                self._note(peer, does_answer=does_answer)
                if not does_answer:
                    return
                sending = self._outboxes[peer]
        finally:
            for box in (sending, self._outboxes.pop(peer)):
                if not box.is_sent.done():
                    box.is_sent.set_result(False)

    def _note(self, peer: PeerID, *, does_answer: bool) -> None:
        if does_answer:
            self._silent.discard(peer)
        else:
            self._silent.add(peer)
            self._answered.pop(peer, None)

    # -- other nodes' records ------------------------------------------------------------------------

    async def read(self, key: DHTID) -> bool:
        """Fetch the records under a key that connected peers have and this node lacks.

        Return whether a connected peer has answered: a peer that speaks protocol 2 does not.
        """
        if not (self._is_member and self._answered):  # peers send nothing to a node that only visits
            await self._look_who_is_connected()
            for peer in self._in_turn()[: 1 if self._answered else 3]:  # more before the first answer
                await self._ask(peer)
        there = self._ends(key)
        ended = {place: at for place, at in self._read.get(key, {}).items() if place not in there}
        await asyncio.gather(*map(self._ask, self._unasked_owners(ended)))
        self._read[key] = self._ends(key)
        return bool(self._answered)

    def _in_turn(self) -> list[PeerID]:
        """List the peers to ask: first the peers that have not answered since they connected."""
        listening = [peer for peer in self._connected if peer not in self._silent]
        return sorted(listening, key=lambda peer: self._answered.get(peer, -math.inf))

    def _unasked_owners(self, ends: Mapping[bytes, float]) -> set[PeerID]:
        """Return the known owners in `ends` (end times by place) that this node did not ask in time."""
        ends_at = {peer: at for place, at in ends.items() for peer in _owners([place])}
        known = self._known & ends_at.keys()
        return {peer for peer in known if self._asked[peer] < ends_at[peer] - ENDS_SOON_S}

    async def _ask(self, peer: PeerID) -> None:
        """Ask a peer for the records that this node lacks."""
        if (asking := self._asking.get(peer)) is None:
            asking = self._asking[peer] = self._start(self._compare(peer))
            asking.add_done_callback(lambda _: self._asking.pop(peer))
        await asyncio.shield(asking)

    async def _compare(self, peer: PeerID) -> None:
        does_answer = await self._protocol.call_compare(peer, [record.digest for record in self._kept()])
        self._asked[peer] = swarm_time()
        self._note(peer, does_answer=does_answer)
        if does_answer:
            self._answered[peer] = self._asked[peer]
            self._known.add(peer)

    def hear(self, peer: PeerID) -> None:
        """Note that a peer has called this node, so it is not silent."""
        self._silent.discard(peer)

    def lacking(self, peer: PeerID, digests: frozenset[bytes]) -> StoreRequest:
        """Return the records that a peer lacks; only this node's own if the peer recently got many others."""
        self.hear(peer)
        answer = StoreRequest()
        size = 0
        now = asyncio.get_running_loop().time()
        own_id = self._protocol.p2p.peer_id.to_base58()
        gives_all = self._may_ask_at.get(peer, 0.0) <= now
        for record in self._kept():
            if not (gives_all or owner_of(record.place) == own_id) or record.digest in digests:
                continue
            size += len(record.value) + len(record.place)
            if size > MAX_ANSWER_BYTES:
                break
            answer.keys.append(record.key.to_bytes())
            answer.subkeys.append(packed(record.place))
            answer.values.append(record.value)
            answer.expiration_time.append(record.ends_at)
        if gives_all:
            self._may_ask_at[peer] = now + size / 2**18  # bytes a second
        return answer

    # -- in the background ---------------------------------------------------------------------------

    async def _look_who_is_connected(self) -> list[Any]:
        """Note the connected peers; return their connections, as `list_peers` gives them."""
        connections: list[Any] = await self._protocol.p2p.list_peers()
        there = [one.peer_id for one in connections]
        self._connected = tuple(dict.fromkeys((*there, *self._protocol.routing_table.peer_id_to_uid)))
        for kept in (self._answered, self._may_ask_at):
            for left in kept.keys() - set(self._connected):
                del kept[left]
        self._silent.intersection_update(self._connected)
        return connections

    async def _run(self) -> None:
        """Ask the owners of records that end soon, silent peers, and all peers in rotation."""
        compare_at = 0.0
        new_until = swarm_time() + NEW_S
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(P2PDaemonError, OSError, EOFError):
                connections = await self._look_who_is_connected()
                for peer in await close_dead(self._protocol.p2p, connections):
                    self._start(self._ask(peer))
            now = swarm_time()
            kept = list(self._kept())
            places = {one.place for one in kept}.union(*self._read.values())
            self._known &= _owners(places).union(self._connected)
            ending = {one.place: one.ends_at for one in kept if one.ends_at < now + ENDS_SOON_S}
            silent = {peer for peer in self._silent if self._asked.get(peer, 0.0) + COMPARE_EVERY_S <= now}
            for peer in self._unasked_owners(ending) | silent:
                self._start(self._ask(peer))
            turns = self._in_turn()
            if now < new_until:
                await asyncio.gather(*map(self._ask, turns[:NEW_COMPARES]))
            elif turns and (now >= compare_at or turns[0] not in self._answered):
                await self._ask(turns[0])
                compare_at = now + COMPARE_EVERY_S
