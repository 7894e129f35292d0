"""Strangers cannot enter a closed swarm, and its members train on undisturbed.

The calls are made with plain hivemind, as by an attacker that knows an address and the protocol. The same
calls of a member are answered, which shows that they arrive.
"""

import asyncio
import json
import time
from pathlib import Path

import psutil
import pytest
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID

from tests.kit.commands import LOOPBACK, Workplace
from tests.kit.recipes import write_tiny
from tests.swarm.conftest import LOCAL, above, id_of, told
from trahiv_cli.errors import NotAdmitted
from trahiv_cli.members.door import REFUSAL
from trahiv_cli.members.identity import ensure_identity
from trahiv_cli.members.invitation import read_invitation, read_owner
from trahiv_cli.members.membership import KEY_BYTES, Owner, Role
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.reach.hole_punching import ANSWER, LOOK, MEASURE, SEEK
from trahiv_cli.swarm.node import Node

pytestmark = pytest.mark.timeout(300)

CLIENT = LOCAL.model_copy(update={"client_mode": True})
OWNER = Owner(bytes(range(KEY_BYTES)))
HOME = Credentials(OWNER.invite())


def test_only_members_enter_closed_swarm(tmp_path):
    """Kicked members and closed invitations are tested below."""
    others = {
        "is closed": None,
        "does not take this peer for a member": Credentials(Owner(bytes(KEY_BYTES)).invite()),
        "its invitation is over": Credentials(OWNER.invite(expires=1)),
    }
    with Node(LOCAL, tmp_path / "a.key", credentials=HOME) as a:
        to_a = (a.own_addresses()[0],)
        for words, stands in others.items():
            with pytest.raises(NotAdmitted, match=words) as refused:
                Node(LOCAL, tmp_path / "m.key", to_a, credentials=stands)
            assert refused.value.exit_code == 5
        assert a.fetch("trahiv_addresses").keys() <= {a.peer_id}
        with Node(LOCAL, tmp_path / "b.key", to_a, credentials=Credentials(OWNER.invite())) as b:
            assert b.publish("key", 1, ttl_s=60)
            assert a.fetch("key") == {b.peer_id: 1}
            to_b = (b.own_addresses()[0],)
            with Node(CLIENT, tmp_path / "c.key", to_b, credentials=HOME) as c:
                assert c.fetch("key") == {b.peer_id: 1}, "a member that nobody can call"
            stands = Credentials(OWNER.invite(Role.watcher))
            with Node(CLIENT, tmp_path / "w.key", to_a, credentials=stands, is_visitor=True) as watcher:
                assert watcher.fetch("key") == {b.peer_id: 1}
                watcher.publish("key", 2, ttl_s=60)
                assert a.fetch("key") == {b.peer_id: 1}, "a watcher reads and can store nothing"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The workplace of the two peers of `members`, with their folders `first` and `second`."""
    with Workplace(tmp_path_factory.mktemp("pair")) as place:
        yield place


@pytest.fixture(scope="module")
def members(place):
    """Two peers that train together during all of the following tests."""
    recipe = write_tiny(place.folder, training__max_steps=10_000, swarm__mode="sync")
    first = place.start("init", recipe, "--output-dir", "first", pace_s=0.1)
    line = "trahiv join --peer " + Path(first.address[1:]).read_text(encoding="ascii").strip()
    mailed = f"“{line[:70]}\n> {line[70:140]}\n> {line[140:]}”"  # wrapped and quoted
    join = ("join", recipe, mailed, "--output-dir", "second", "--yes", *LOOPBACK)
    second = place.start(*join, pace_s=0.1)
    for peer in (first, second):
        peer.wait_for_group()
    return first, second


async def call(p2p, victim, handler, certificate):
    """Call a handler with an empty message."""
    await p2p._client.call_unary_handler(victim, handler, certificate)


async def stream(p2p, victim, handler, certificate):
    """Open a stream, send an empty message, and wait for what comes back."""
    _, reader, writer = await p2p._client.stream_open(victim, [handler])
    try:
        writer.write(certificate + P2P.MESSAGE_MARKER + bytes(8))
        await P2P.send_protobuf(P2P.END_OF_STREAM, writer)
        kind = await reader.readexactly(1)
        content = await reader.readexactly(int.from_bytes(await reader.readexactly(8), "big"))
    finally:
        writer.close()
    if kind == P2P.ERROR_MARKER:
        raise P2PHandlerError(content.decode(errors="replace"))


def attack(victim, key, certificate):
    """Call every handler of a peer with plain hivemind: tested code does not test itself.

    Returns:
        The outcome of each call: `answered`, or the error.
    """
    run = victim.wait_for("ready", 60)["run_id"]
    grads = f"{run}_grad_averager::ExactGradientAverager"
    state = f"{run}_state_averager::ExactStateAverager"
    unary = [f"CorrectedProtocol.rpc_{name}" for name in ("ping", "find", "store")]
    unary += [f"{grads}.rpc_vote", f"{state}.rpc_offer_state"]
    streams = [f"{grads}.rpc_join_group", f"{grads}.rpc_aggregate_part", f"{state}.rpc_send_state"]
    streams += [LOOK, MEASURE, SEEK, ANSWER]
    calls = dict.fromkeys(unary, call) | dict.fromkeys(streams, stream)

    async def make():
        options = {"dht_mode": "client", "no_listen": True, "auto_nat": False}
        p2p = await P2P.create(initial_peers=[victim.maddr], identity_path=str(key), **options)
        victim_id, outcomes = PeerID.from_base58(victim.maddr.rpartition("/p2p/")[2]), {}
        try:
            for handler, make_call in calls.items():
                name = handler.rpartition(".")[2]
                try:
                    async with asyncio.timeout(40.0):
                        await make_call(p2p, victim_id, handler, certificate)
                    outcomes[name] = "answered"
                except (P2PHandlerError, P2PDaemonError, TimeoutError, OSError, EOFError) as error:
                    outcomes[name] = f"{type(error).__name__}: {error}"
        finally:
            await p2p.shutdown()
        return outcomes

    return asyncio.run(make())


def certified(by, key):
    return by.certify(PeerID.from_base58(ensure_identity(key)).to_bytes())


def test_stranger_calls_are_refused_without_harm(members, place, tmp_path):
    """Members that lie are tested in `tests/simulation` and `tests/unit/swarm`."""
    first, _ = members
    owner, home = read_owner(place.folder / "first"), read_invitation([first.address]).membership
    key = tmp_path / "member.key"
    of_member = attack(first, key, certified(owner.invite(), key))
    assert not any(REFUSAL in outcome for outcome in of_member.values())
    assert {of_member[name] for name in ("rpc_ping", "rpc_find", "rpc_join_group")} == {"answered"}
    stolen = certified(home, place.folder / "second/identity.key")
    closed_early = ("IncompleteReadError", "ConnectionResetError", "BrokenPipeError")
    strangers = {tmp_path / "without.key": b"", tmp_path / "thief.key": stolen}
    for key, certificate in strangers.items():
        for name, outcome in attack(first, key, certificate).items():
            assert REFUSAL in outcome or outcome.startswith(closed_early), (name, outcome)
    reached = first.steps[-1]["step"]
    for peer in members:
        peer.wait_for_group(step=above(reached + 4))
        since = peer.events[peer.events.index(peer.wait_for_group()) :]
        assert not told(since, "warning") + told(since, "error")
        assert all(event["round"]["committed"] for event in since if event.get("round"))
    log = (place.folder / "first/trahiv.log").read_text()
    for key in strangers:  # once by each process of the peer
        assert 1 <= log.count(f"{ensure_identity(key)} was refused") <= 3


PRIVATE = {"owner.key", "secret.key", "invitation", "identity.key", "invited-by"}
"""Files of a run's folder that hold secrets."""


def test_secrets_stay_in_private_files(members, place):
    first, second = members
    owner = bytes.fromhex((place.folder / "first/owner.key").read_text())
    secrets = [b"trahiv1:"]
    for secret in (owner, read_invitation([first.address]).membership.secret):
        secrets += [secret, secret.hex().encode()]
    said = []
    for peer in members:
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
    [done] = told(second.events, "done")
    assert done["resume"].endswith("--peer @second/invited-by")


def together(*peers):
    """Wait until all have taken a few more steps in one group."""
    before = max(peer.steps[-1]["step"] if peer.steps else 0 for peer in peers)
    for peer in peers:
        peer.wait_for_group(len(peers), 120, step=above(before + 2))


def invitation(command):
    """Return the one invitation of a command, which does not print it."""
    assert "trahiv1:" not in command.out + command.err
    [made] = told(command.events, "invitation")
    return made


@pytest.mark.timeout(400)
def test_kicked_member_and_closed_invitations_stay_out(pair, start_paced, trahiv):
    first, second, _, join = pair
    kick_s = 30.0  # within this time a kicked peer is out everywhere
    joins = ("join", "--yes", *LOOPBACK, "--output-dir")
    invite = ("invite", "--output-dir", "first", "--format", "json")
    once = invitation(trahiv(*invite, "--once"))
    assert once["once"] is True
    third = start_paced(*joins, "third", "--peer", f"@{once['path']}")
    together(first, second, third)

    old = Path(first.address[1:]).read_text(encoding="ascii").strip()
    fresh = f"@{invitation(trahiv(*invite, '--close', 'all', '--expires', '1h'))['path']}"
    together(first, second, third)
    late = trahiv(*joins, "late", "--peer", old)
    assert late.code == 5
    assert "closed" in late.err
    second.stop()
    second = start_paced(*joins, "second", "--peer", "@second/invited-by")
    together(first, second, third)
    ids = set(map(id_of, (first, second, third)))
    listed = trahiv("members", "--peer", fresh, "--format", "json").events
    assert {event["peer_id"] for event in told(listed, "member", is_there=True)} == ids
    seen = trahiv("status", "--peer", fresh, "--format", "json").events
    [run] = told(seen, "run")
    assert run["peers"] == 3
    assert 0 < run["step"] < run["max_steps"]
    assert run["seconds_since_round"] < 30
    assert {event["peer_id"] for event in told(seen, "peer")} == ids

    id_ = id_of(third)
    kicked, at = trahiv("kick", id_[-6:], "--output-dir", "first"), time.monotonic()
    assert kicked.code == 0
    assert id_ in kicked.out
    assert third.exit_code(kick_s + 30) == 5
    assert time.monotonic() - at < kick_s
    [error] = third.errors
    assert error["code"] == "not-admitted"
    assert "taken this peer out" in error["message"]
    together(first, second)
    after = first.steps[-1]["step"]
    again, other = (trahiv(*joins, name, "--peer", "@third/invited-by") for name in ("third", "other"))
    assert (again.code, other.code) == (5, 5)
    assert "taken this peer out" in again.err
    assert "used before" in other.err, "under another name"
    together(first, second)
    for peer in (first, second):
        assert all(id_ not in step["round"]["group"] for step in peer.steps if step["step"] > after)
    for peer in (first, second, third):
        assert all(step["round"]["committed"] for step in peer.steps if step["round"])
    assert first.errors == []
