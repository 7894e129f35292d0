"""Strangers before a closed swarm: what they try comes to nothing, and the members train on as if alone.

The attacks are made with plain hivemind, as somebody would who knows an address and how this works. A
member's are answered: so it is known that they bite.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, dht_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from tests.kit.commands import LOOPBACK, Peer, Workplace
from tests.kit.recipes import write_tiny
from trahiv_cli.errors import NotAdmitted
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.door import REFUSAL
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.invitation import read_invitation, read_owner
from trahiv_cli.swarm.membership import KEY_BYTES, Membership, Owner, Role
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.roll import Credentials

pytestmark = pytest.mark.timeout(300)

LOCAL = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)
CLIENT = LOCAL.model_copy(update={"client_mode": True})
OWNER, OTHER = Owner(bytes(range(KEY_BYTES))), Owner(bytes(KEY_BYTES))
HOME = Credentials(OWNER.invite())
ATTACK_S = 40.0
DHT = "CorrectedProtocol"


def test_members_find_each_other_and_their_records_and_a_stranger_is_not_admitted(tmp_path: Path) -> None:
    """Who was taken out, or came by a closed invitation, is in `test_owner.py`."""
    others = {
        "is closed": None,
        "does not take this peer for a member": Credentials(OTHER.invite()),
        "its invitation is over": Credentials(OWNER.invite(expires=1)),
    }
    with Node(LOCAL, tmp_path / "a.key", standing=HOME) as a:
        to_a = (a.own_addresses()[0],)
        for words, stands in others.items():
            with pytest.raises(NotAdmitted, match=words) as refused:
                Node(LOCAL, tmp_path / "m.key", to_a, standing=stands)
            assert refused.value.exit_code == 5
        assert a.fetch("trahiv_addresses").keys() <= {a.peer_id}
        with Node(LOCAL, tmp_path / "b.key", to_a, standing=Credentials(OWNER.invite())) as b:
            assert b.publish("key", 1, ttl_s=60)
            assert a.fetch("key") == {b.peer_id: 1}
            to_b = (b.own_addresses()[0],)
            with Node(CLIENT, tmp_path / "c.key", to_b, standing=HOME) as c:
                assert c.fetch("key") == {b.peer_id: 1}, "a member that nobody can call"
            stands = Credentials(OWNER.invite(Role.watcher))
            with Node(CLIENT, tmp_path / "w.key", to_a, standing=stands, is_visitor=True) as watcher:
                assert watcher.fetch("key") == {b.peer_id: 1}
                watcher.publish("key", 2, ttl_s=60)
                assert a.fetch("key") == {b.peer_id: 1}, "a watcher reads and can store nothing"


# -- a training swarm -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(open_workplace: Callable[[str], Workplace]) -> Iterator[Workplace]:
    """Where the two peers of `pair` have their folders, `first` and `second`."""
    with open_workplace("pair") as place:
        yield place


@pytest.fixture(scope="module")
def pair(place: Workplace) -> tuple[Peer, Peer]:
    """Two peers that train together, and live through all that follows."""
    recipe = write_tiny(place.folder, training__max_steps=10_000, swarm__mode="sync")
    first = place.start("init", recipe, "--output-dir", "first", pace_s=0.1)
    line = "trahiv join --peer " + Path(first.address[1:]).read_text(encoding="ascii").strip()
    mailed = f"“{line[:70]}\n> {line[70:140]}\n> {line[140:]}”"  # wrapped and quoted
    join = ("join", recipe, mailed, "--output-dir", "second", "--yes", *LOOPBACK)
    second = place.start(*join, pace_s=0.1)
    for peer in (first, second):
        peer.wait_for_group()
    return first, second


class Attacker:
    """Calls a victim's handlers with whatever it likes, after a certificate.

    It is plain hivemind: what is tested is not used to test it.
    """

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


def attack(victim: Peer, key: Path, certificate: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Make attacks, one after the other; return what came of each: `answered`, or the error."""
    run = victim.wait_for("ready", 60)["run_id"]

    async def make() -> dict[str, str]:
        options = {"dht_mode": "client", "no_listen": True, "auto_nat": False}
        p2p = await P2P.create(initial_peers=[victim.maddr], identity_path=str(key), **options)
        attacker = Attacker(p2p, PeerID.from_base58(victim.maddr.rpartition("/p2p/")[2]), run, certificate)
        outcomes = {}
        try:
            for name in names:
                try:
                    async with asyncio.timeout(ATTACK_S):
                        await attacker.make(name)
                    outcomes[name] = "answered"
                except (P2PHandlerError, P2PDaemonError, TimeoutError, OSError, EOFError) as error:
                    outcomes[name] = f"{type(error).__name__}: {error}"
        finally:
            await p2p.shutdown()
        return outcomes

    return asyncio.run(make())


def certified(by: Membership, key: Path) -> bytes:
    return by.certify(PeerID.from_base58(ensure_identity(key)).to_bytes())


READS = ("ping", "read_records", "take_the_state")
STRANGER_S = (*READS, "join_a_group", "send_a_part", "write_a_record")
"""What a stranger tries. What a member gets that lies is in `tests/simulation` and `tests/unit/swarm`."""


def test_a_stranger_gets_nothing_and_is_named_once_and_no_round_is_lost(
    pair: tuple[Peer, Peer], place: Workplace, tmp_path: Path
) -> None:
    first, _ = pair
    owner, home = read_owner(place.folder / "first"), read_invitation([first.address]).membership
    assert owner is not None and home is not None
    key = tmp_path / "member.key"
    of_member = attack(first, key, certified(owner.invite(), key), (*READS, "write_a_record"))
    not_kept = "P2PHandlerError: the record was not kept"
    assert of_member == dict.fromkeys(READS, "answered") | {"write_a_record": not_kept}, "attacks bite"
    stolen = certified(home, place.folder / "second" / "identity.key")
    closed_early = ("IncompleteReadError", "ConnectionResetError", "BrokenPipeError")
    strangers = {tmp_path / "without.key": b"", tmp_path / "thief.key": stolen}
    ids = [ensure_identity(key) for key in strangers]
    for key, certificate in strangers.items():
        for name, outcome in attack(first, key, certificate, STRANGER_S).items():
            assert REFUSAL in outcome or outcome.startswith(closed_early), (name, outcome)
    reached = first.steps[-1]["step"]
    for peer in pair:
        peer.wait_for_group(step=lambda step: step >= reached + 5)
        together = peer.events[peer.events.index(peer.wait_for_group()) :]
        assert not [event for event in together if event["event"] in ("warning", "error")]
        assert all(event["round"]["committed"] for event in together if event.get("round"))
    log = (place.folder / "first" / "trahiv.log").read_text()
    for stranger in ids:
        assert 1 <= log.count(f"{stranger} was refused") <= 3, "once by each process of the peer"


PRIVATE = {"owner.key", "secret.key", "invitation", "identity.key", "invited-by"}
"""Files of a run's folder that hold secrets."""


def test_the_secret_is_in_private_files_alone(pair: tuple[Peer, Peer], place: Workplace) -> None:
    first, second = pair
    membership = read_invitation([first.address]).membership
    assert membership is not None
    owner = bytes.fromhex((place.folder / "first" / "owner.key").read_text())
    secrets = [b"trahiv1:"]
    for secret in (owner, membership.secret):
        secrets += [secret, secret.hex().encode()]
    said = []
    for peer in pair:
        for process in (psutil.Process(peer.pid), *psutil.Process(peer.pid).children(recursive=True)):
            is_p2pd = process.name().startswith("p2pd")
            said += [*process.cmdline(), *(process.environ().values() if is_p2pd else ())]
    for peer, name, missing in ((first, "first", "invited-by"), (second, "second", "owner.key")):
        peer.stop()
        said += [json.dumps(peer.events), peer.err]
        assert {path.name for path in (place.folder / name).iterdir()} >= PRIVATE - {missing}
    assert not any(secret in one.encode(errors="replace") for secret in secrets for one in said)
    for file in filter(Path.is_file, place.folder.rglob("*")):
        if file.name in PRIVATE:
            assert file.stat().st_mode & 0o077 == 0, file
        else:
            assert not any(secret in file.read_bytes() for secret in secrets), file
    (done,) = [event for event in second.events if event["event"] == "done"]
    assert done["resume"].endswith("--peer @second/invited-by")
