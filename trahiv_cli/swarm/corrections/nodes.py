"""Requests among the nodes of the DHT, and the checks of their answers.

A node takes over the swarm's time, keeps the records of all peers (`copies`), limits its answers to the size
of a message, and keeps the valid records of an answer that also has invalid ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import hivemind
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, P2PHandlerError, PeerID
from hivemind.proto.dht_pb2 import (
    NOT_FOUND,
    FindRequest,
    FindResponse,
    NodeInfo,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
)
from hivemind.utils import MSGPackSerializer, get_logger
from hivemind.utils.auth import AuthRole, AuthRPCWrapper

from trahiv_cli.clock import swarm_time, take_over
from trahiv_cli.members.records import MAX_ID_BYTES, SIGNATURE_PRIORITY, Quota, ignore_peer, owner_of
from trahiv_cli.net.streams import UNREACHABLE
from trahiv_cli.swarm.copies import MAX_ANSWER_BYTES, Copies
from trahiv_cli.wire import unpacked

logger = get_logger(__name__)

# Invalid records of one answer after which a node ignores the rest: an honest sender has checked them. To
# check one takes 0.3 ms.
MOST_FORGED = 32

# The peers through which the node that is being made enters a swarm.
_initial_peers: ContextVar[Collection[PeerID]] = ContextVar("_initial_peers", default=())


def node_id_of(peer_id: bytes) -> DHTID:
    """Return the id of a peer's only node: a hash of the peer's id."""
    return DHTID.generate(source=peer_id)


class CorrectedNode(DHTNode):
    """`DHTNode` that has the records of all peers (`Copies`), and reports that a swarm refused it."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTNode:
        """Make a node; see `DHTNode`. NotAdmitted if no initial peer let it in, and one refused it."""
        maddrs = map(str, kwargs.get("initial_peers") or ())
        _initial_peers.set({PeerID.from_base58(maddr.rpartition("/p2p/")[2]) for maddr in maddrs})
        try:
            return await super().create(*args, **kwargs)
        except RuntimeError as error:
            door = hivemind.dht.node.P2P.door
            if not door.was_refused:
                raise
            raise door.why_refused() from error

    async def store(
        self, key: Any, value: Any, expiration_time: float, subkey: bytes | None = None, **_: Any
    ) -> bool:
        """Store a record in the place of its owner; see `Copies.put`."""
        assert subkey is not None, "a record has an owner"
        packed = self.protocol.serializer.dumps(value)
        return await self.protocol.copies.put(DHTID.generate(source=key), subkey, packed, expiration_time)

    async def get(self, key: Any, **_: Any) -> Any:
        """Return the records under a key by their owners' places; see `Copies.read`."""
        key_id = DHTID.generate(source=key)
        is_answered = await self.protocol.copies.read(key_id)
        if self.protocol.storage.get(key_id) is not None:
            return await super().get(key)
        return None if is_answered else await super().get(key, latest=True)

    async def shutdown(self) -> None:
        """Shut down; see `DHTNode`."""
        self.protocol.copies.close()
        await super().shutdown()


class CorrectedProtocol(DHTProtocol):
    """`DHTProtocol` of a node that takes over the time of the swarm that it enters, and drops bad records.

    - dht/protocol.py:126 ends a node that is more than 3 s apart from one of its `initial_peers`. This one
      takes over their median time, and does without the peers that still differ.
    - dht/protocol.py:420 refuses a whole dictionary for one record in it: a peer that gets a bad record into
      an answer hides all others.
    - The records that a peer may store or answer have no limit, and dht/node.py:837 keeps all of them
      (`records.Quota`). Nor has a message with stored records (dht/protocol.py:355, :395): p2pd refuses more
      than 4 MiB, and a peer that gets no answer forgets the node.
    - dht/protocol.py:304 writes ids of any number and length in base58, which takes hours for 4 MiB.
    - dht/routing.py:263 lets a node choose its id: one peer takes all places near a key (`node_id_of`).
    - dht/protocol.py:84 makes other nodes ask a node that they can't dial. A node that enters a swarm is not
      listed until a member has dialled it, or while no member answers (`reachability`).
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.quota = Quota()
        self.copies = Copies(self)

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTProtocol:
        """Make a protocol; see `DHTProtocol`. It asks for the time before its node pings any peer."""
        protocol = await super().create(*args, **kwargs)
        if _initial_peers.get():
            protocol.list_node(is_listed=False)
        await protocol._take_over_time(_initial_peers.get())
        return protocol

    @property
    def is_listed(self) -> bool:
        """Whether nodes that receive a message of this one add it to their routing tables."""
        return bool(self.node_info.node_id)

    def list_node(self, *, is_listed: bool) -> None:
        """List this node for others, or unlist it; see `is_listed`."""
        self.node_info = NodeInfo(node_id=self.node_id.to_bytes() if is_listed else b"")

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Ping; see `DHTProtocol`. A peer for which upstream would end this node counts as absent."""
        # If two lone nodes find each other later, one of them keeps its time.
        gives_way = not strict and self.p2p.peer_id.to_base58() > peer.to_base58()
        if gives_way and not self.routing_table.uid_to_peer_id:
            await self._take_over_time([peer])
        try:
            return await super().call_ping(peer, validate=validate and self.is_listed, strict=strict)
        except ValidationError as error:
            logger.warning(f"Peer {peer} is not entered by: {error}")
            return None

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Note whether a node answered; see `DHTProtocol`. The `node_id` that it claims is ignored."""
        await super().update_routing_table(node_id_of(peer_id.to_bytes()), peer_id, responded)

    async def _take_over_time(self, peers: Iterable[PeerID]) -> None:
        """Ask peers for the time, all at once, and take over the median."""

        async def ask(peer: PeerID) -> tuple[float, float] | None:
            asked_at = swarm_time()
            try:
                answer = await self.get_stub(peer).rpc_ping(PingRequest(), timeout=self.wait_timeout)
            except UNREACHABLE:
                return None
            delay = swarm_time() - asked_at
            return answer.dht_time - asked_at - delay / 2, delay

        if seconds := take_over(filter(None, await asyncio.gather(*map(ask, peers)))):
            logger.warning(f"The swarm's time is taken over: this machine's was {-seconds:+.1f} s off.")

    def get_stub(self, peer: PeerID) -> Any:
        """Return a stub that calls another node; see `DHTProtocol`. It refuses answers with invalid ids."""
        stub = super().get_stub(peer)

        async def rpc_ping(request: PingRequest, **options: Any) -> PingResponse:
            answer = await stub.rpc_ping(request, **options)
            require(len(answer.peer.node_id) in (0, DHTID.HASH_NBYTES))
            return answer

        async def rpc_find(request: FindRequest, **options: Any) -> FindResponse:
            answer = await stub.rpc_find(request, **options)
            for result in answer.results:
                require(len(result.nearest_peer_ids) <= self.bucket_size)
                require(all(len(one) <= MAX_ID_BYTES for one in result.nearest_peer_ids))
                result.nearest_node_ids[:] = [node_id_of(one).to_bytes() for one in result.nearest_peer_ids]
            return answer

        def require(is_met: bool) -> None:
            if not is_met:
                ignore_peer(str(peer), "it answers with ids that are none")
                raise P2PHandlerError(f"peer {peer} answered with ids that are none")

        return SimpleNamespace(
            rpc_ping=rpc_ping, rpc_find=rpc_find, rpc_store=stub.rpc_store, rpc_compare=stub.rpc_compare
        )

    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
        """Answer with the records under keys, as far as they fit into a message; see `DHTProtocol`."""
        del request.keys[16:]  # hivemind looks up four (dht/node.py:661) of the 16 that it renews at once
        response = await super().rpc_find(request, context)
        left = MAX_ANSWER_BYTES
        for result in response.results:
            left -= len(result.value)
            if left < 0:
                result.type = NOT_FOUND
                result.value = b""
        return response

    async def rpc_store(self, request: StoreRequest, context: P2PContext) -> StoreResponse:
        """Keep the records that another node sends, none of them in the cache; see `DHTProtocol`."""
        request.in_cache[:] = [False] * len(request.in_cache)
        self.copies.hear(context.remote_id)
        return await super().rpc_store(request, context)

    async def call_store(
        self, peer: PeerID, keys: Any, values: Any, expiration_time: Any, subkeys: Any = None, **options: Any
    ) -> list[bool] | None:
        """Send records to another node; see `DHTProtocol`. A call without subkeys sends nothing.

        `DHTProtocol` makes such calls to give a new node records; here `Copies` compares them instead.
        """
        if subkeys is None:
            return None
        return await super().call_store(peer, keys, values, expiration_time, subkeys, **options)

    async def call_compare(self, peer: PeerID, digests: Sequence[bytes]) -> bool:
        """Keep the records of another node that have none of these digests; return whether it answered."""
        try:
            async with asyncio.timeout(self.wait_timeout):
                found = await self.get_stub(peer).rpc_compare(FindRequest(keys=digests, peer=self.node_info))
        except UNREACHABLE:
            return False
        num_bad = 0
        records = zip(found.keys, found.subkeys, found.values, found.expiration_time, strict=False)
        for record in islice(records, 2**12):  # the most that one node may answer at once
            if not self._keep(*record):
                num_bad += self.quota.has_room(DHTRecord(*record))  # the validators refused it
            if num_bad >= MOST_FORGED:
                break
        return True

    def _keep(self, key: bytes, place: bytes, value: bytes, ends_at: float) -> bool:
        """Keep a record from another node's answer; return whether it is valid."""
        is_owned = len(key) == DHTID.HASH_NBYTES and place not in (self.IS_DICTIONARY, self.IS_REGULAR_VALUE)
        if is_good := is_owned and self._validate_record(key, place, value, ends_at):
            self.storage.store_subkey(DHTID.from_bytes(key), unpacked(place), value, ends_at)
        return is_good

    async def rpc_compare(self, request: FindRequest, context: P2PContext) -> StoreRequest:
        """Return the records that a node lacks; the request has the digests of the records that it has."""
        return self.copies.lacking(context.remote_id, frozenset(request.keys))

    async def serve_always(self) -> None:
        """Serve other nodes in client mode, too, over the connections that this node has opened."""
        if self.client_mode:
            await self.add_p2p_handlers(self.p2p, AuthRPCWrapper(self, AuthRole.SERVICER, self.authorizer))

    def _validate_record(self, *content: Any) -> bool:  # key, subkey, value and expiration time
        record = DHTRecord(*content)
        if is_kept := self.quota.has_room(record) and super()._validate_record(*content):
            self.quota.count(record)
        return is_kept

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        bad = []
        num_forged = 0
        with dictionary.freeze():
            for subkey, (value, expires) in dictionary.items():
                record = key_bytes, self.serializer.dumps(subkey), value, expires
                if num_forged >= MOST_FORGED or not self._validate_record(*record):
                    bad.append(subkey)
                    num_forged += self.quota.has_room(DHTRecord(*record))  # the validators refused it
        for subkey in bad:
            del dictionary[subkey]
        return True


class RememberingValidator(CompositeValidator):
    """`CompositeValidator` that checks the same record once, and logs an owner that signed a bad one.

    dht/protocol.py:424 checks every record in every answer again: sixteen peers kept two cores busy.
    """

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()) -> None:
        self._verdict = lru_cache(2048)(self._judge)
        super().__init__(validators)

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        """Add validators, and forget the results of earlier checks."""
        self._verdict.cache_clear()
        super().extend(validators)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether a record is valid, which depends on its bytes alone."""
        return self._verdict(record)

    def _judge(self, record: DHTRecord) -> bool:
        is_good = super().validate(record)
        before = [one for one in self._validators if one.priority >= SIGNATURE_PRIORITY]
        if not is_good and before and CompositeValidator(before).validate(record):  # its owner signed it
            ignore_peer(str(owner_of(unpacked(record.subkey))), "it publishes a record that no peer can read")
        return is_good


def pack_dictionary(dictionary: DictionaryDHTValue) -> bytes:
    """Pack the records under a key for a message, the first ones stored first, as many as fit.

    dht/storage.py:22 packs all of them, whatever their number; see `CorrectedProtocol`.
    """
    items = []
    left = MAX_ANSWER_BYTES - 64  # MessagePack adds less to the records under one key
    for subkey, (value, expires) in dictionary.items():
        left -= len(MSGPackSerializer.dumps([subkey, value, expires]))
        if left < 0:
            break
        items.append([subkey, value, expires])
    return MSGPackSerializer.dumps([dictionary.maxsize, dictionary.latest_expiration_time, items])
