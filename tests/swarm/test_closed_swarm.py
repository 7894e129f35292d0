"""Strangers before a closed swarm: what they try comes to nothing, and the members train on as if alone.

The attacks are made by `tests.kit.attacker` with plain hivemind, as somebody would who knows an address
and how this works. A member's are answered: so it is known that they bite.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind.p2p import PeerID

from tests.kit import attacker
from tests.kit.commands import Peer, Workplace
from tests.kit.recipes import write_tiny
from trahiv_cli.errors import NotAdmitted
from trahiv_cli.recipe.schema import DhtSection
from trahiv_cli.swarm.door import REFUSAL
from trahiv_cli.swarm.identity import ensure_identity
from trahiv_cli.swarm.invitation import read_invitation, read_owner
from trahiv_cli.swarm.membership import KEY_BYTES, Membership, Owner, Role
from trahiv_cli.swarm.node import Node
from trahiv_cli.swarm.roll import Credentials

WaitUntil = Callable[..., Any]

pytestmark = pytest.mark.timeout(300)

LOOPBACK = ("--host-maddr", "/ip4/127.0.0.1/tcp/0")
LOCAL = DhtSection(host_maddrs=["/ip4/127.0.0.1/tcp/0"], nat_port_map=False, auto_nat=False)
CLIENT = LOCAL.model_copy(update={"client_mode": True})
OWNER, OTHER = Owner(bytes(range(KEY_BYTES))), Owner(bytes(KEY_BYTES))
HOME = OWNER.invite()


def standing(membership: Membership, folder: Path | None = None) -> Credentials:
    return Credentials(membership, OWNER if folder else None, folder)


# -- nodes ----------------------------------------------------------------------------------------


def test_members_find_each_other_and_their_records(tmp_path: Path) -> None:
    with Node(LOCAL, tmp_path / "a.key", standing=standing(HOME)) as a:
        to_a = (a.addresses()[0].maddr,)
        with Node(LOCAL, tmp_path / "b.key", to_a, standing=standing(OWNER.invite())) as b:
            assert b.publish("key", 1, ttl_s=60)
            assert a.fetch("key") == {b.peer_id: 1}
            to_b = (b.addresses()[0].maddr,)
            with Node(CLIENT, tmp_path / "c.key", to_b, standing=standing(HOME)) as c:
                assert c.fetch("key") == {b.peer_id: 1}, "a member that nobody can call"
            stands = standing(OWNER.invite(Role.watcher))
            with Node(CLIENT, tmp_path / "w.key", to_a, standing=stands, is_visitor=True) as watcher:
                assert watcher.fetch("key") == {b.peer_id: 1}
                watcher.publish("key", 2, ttl_s=60)
                assert a.fetch("key") == {b.peer_id: 1}, "a watcher reads and can store nothing"


def test_a_stranger_is_told_that_it_is_not_admitted(tmp_path: Path) -> None:
    """Who was taken out, or came by a closed invitation, is in `test_owner.py`."""
    others: dict[str, Membership | None] = {
        "is closed": None,
        "does not take this peer for a member": OTHER.invite(),
        "its invitation is over": OWNER.invite(expires=1),
    }
    with Node(LOCAL, tmp_path / "a.key", standing=standing(HOME)) as a:
        for words, membership in others.items():
            with pytest.raises(NotAdmitted, match=words) as refused:
                stands = standing(membership) if membership else None
                Node(LOCAL, tmp_path / "m.key", (a.addresses()[0].maddr,), standing=stands)
            assert refused.value.exit_code == 5
        assert a.fetch("trahiv_addresses").keys() <= {a.peer_id}


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
        peer.wait_for("step", 90, round=lambda round_: round_ and len(round_["group"]) == 2)
    return first, second


@pytest.fixture
def attack(pair: tuple[Peer, Peer]) -> Callable[..., dict[str, str]]:
    """`attack(victim, *attacks, key=..., certificate=...)`: what came of each, `answered` or the error."""
    run = pair[0].wait_for("ready", 60)["run_id"]

    def attack(victim: Peer, *attacks: str, key: Path, certificate: bytes = b"") -> dict[str, str]:
        async def make() -> dict[str, str]:
            outcomes = attacker.attack(victim.maddr, run, str(key), certificate, list(attacks))
            return {name: outcome async for name, outcome in outcomes}

        return asyncio.run(make())

    return attack


def certified(by: Membership, key: Path) -> bytes:
    return by.certify(PeerID.from_base58(ensure_identity(key)).to_bytes())


READS = ("ping", "read_records", "take_the_state")
STRANGER_S = (*READS, "join_a_group", "send_a_part", "write_a_record")
"""What a stranger tries. What a member gets that lies is in `tests/simulation` and `tests/unit/swarm`."""


def test_a_stranger_gets_nothing_and_is_named_once_and_no_round_is_lost(
    pair: tuple[Peer, Peer], place: Workplace, tmp_path: Path, attack: Callable[..., dict[str, str]]
) -> None:
    first, _ = pair
    owner, home = read_owner(place.folder / "first"), read_invitation([first.address]).membership
    assert owner is not None and home is not None
    strangers, key = [], tmp_path / "member.key"
    of_member = attack(first, *READS, "write_a_record", key=key, certificate=certified(owner.invite(), key))
    not_kept = "P2PHandlerError: the record was not kept"
    assert of_member == dict.fromkeys(READS, "answered") | {"write_a_record": not_kept}, "attacks bite"
    stolen = certified(home, place.folder / "second" / "identity.key")
    for number, certificate in enumerate((b"", stolen)):
        key = tmp_path / f"stranger-{number}.key"
        strangers.append(ensure_identity(key))
        came_of = attack(first, *STRANGER_S, key=key, certificate=certificate)
        closed_early = ("IncompleteReadError", "ConnectionResetError", "BrokenPipeError")
        for name, outcome in came_of.items():
            assert REFUSAL in outcome or outcome.startswith(closed_early), (name, outcome)
    require_no_round_lost(pair)
    log = (place.folder / "first" / "trahiv.log").read_text()
    for stranger in strangers:
        assert 1 <= log.count(f"{stranger} was refused") <= 3, "once by each process of the peer"


def require_no_round_lost(pair: tuple[Peer, Peer], more: int = 5) -> None:
    """Check that all rounds since the two began to train together came to pass, and that more do."""
    before = [event["step"] for event in pair[0].events if event["event"] == "step"][-1]
    for peer in pair:
        peer.wait_for("step", 60, step=lambda step: step >= before + more)
        together = next(n for n, event in enumerate(peer.events) if is_of_two(event))
        since = peer.events[together:]
        troubles = [event for event in since if event["event"] in ("warning", "error")]
        assert not troubles, troubles
        assert all(event["round"]["committed"] for event in since if event.get("round"))


def is_of_two(event: dict[str, Any]) -> bool:
    return event["event"] == "step" and bool(event["round"]) and len(event["round"]["group"]) == 2


PRIVATE = {"owner.key", "secret.key", "invitation", "identity.key", "invited-by"}
"""Files of a run's folder that hold secrets."""


def test_the_secret_is_in_private_files_alone(pair: tuple[Peer, Peer], place: Workplace) -> None:
    first, second = pair
    for peer in pair:
        for process in (psutil.Process(peer.pid), *psutil.Process(peer.pid).children(recursive=True)):
            assert not any("trahiv1:" in word for word in process.cmdline())
            if process.name().startswith("p2pd"):
                assert "trahiv1:" not in " ".join(process.environ().values())
    invitation = read_invitation([first.address])
    assert invitation.membership is not None
    owner = (place.folder / "first" / "owner.key").read_text().strip()
    secret = invitation.membership.secret
    secrets = [b"trahiv1:", secret.hex().encode(), secret, owner.encode(), bytes.fromhex(owner)]
    for peer in pair:
        peer.stop()
    assert {path.name for path in (place.folder / "first").iterdir()} >= PRIVATE - {"invited-by"}
    assert {path.name for path in (place.folder / "second").iterdir()} >= PRIVATE - {"owner.key"}
    for file in filter(Path.is_file, place.folder.rglob("*")):
        if file.name in PRIVATE:
            assert file.stat().st_mode & 0o077 == 0, file
        else:
            content = file.read_bytes()
            assert not any(secret in content for secret in secrets), file
    for peer in pair:
        said = json.dumps(peer.events).encode() + peer.err.encode()
        assert not any(secret in said for secret in secrets)
    (done,) = [event for event in second.events if event["event"] == "done"]
    assert done["resume"].endswith("--peer @second/invited-by")
