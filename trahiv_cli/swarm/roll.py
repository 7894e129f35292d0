"""The roll of a closed swarm: its members, and what its owner has decided about them.

Each member publishes its certificate with the marks of those that it saw come before their invitations
expired, and hands on the owner's policy. The owner's peer writes down who came by which invitation, and has
those stay that came before theirs was closed, used or over.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID

from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.membership import CERTIFICATE_BYTES, Grant, Membership, Owner, Role, certified
from trahiv_cli.swarm.policy import MAX_ARRIVALS, POLICY_FILE, Policy, PolicyBook, mark_of, marks_in
from trahiv_cli.swarm.private_files import write_private
from trahiv_cli.swarm.records import disbelieve
from trahiv_cli.swarm.reunion import Neighbour

ROLL_FILE = "members.json"
"""Its name in the owner's folder."""

VERSION = 1
MAX_MEMBERS = 1000
"""By one invitation, so that names that a member makes up take nobody's place that came by another one."""

LOOK_EVERY_S = 5.0
"""How often the policy, and for the owner's peer the members, are looked up."""

PUBLISH_EVERY_S = 60.0
"""How often a member publishes its certificate, and looks whom others saw come in time."""

CERTIFICATE_TTL_S = 600.0
POLICY_TTL_S = 120.0
"""A member that finds no record of the policy that it knows stores one."""


def members_key() -> str:
    """Where members publish their certificates."""
    return "trahiv_members"


def policy_key() -> str:
    """Where members hand on the owner's policy."""
    return "trahiv_policy"


@dataclass(frozen=True)
class Standing:
    """How a peer stands in a closed swarm."""

    membership: Membership
    owner: Owner | None = None
    """If the swarm is this peer's."""

    folder: Path | None = None
    """Of the run, where the policy is kept; None: a visitor keeps nothing."""

    def book(self) -> PolicyBook:
        """Open the policy."""
        return PolicyBook(self.membership.owner, self.folder and self.folder / POLICY_FILE)


@dataclass(frozen=True)
class Member:
    """Somebody who has come."""

    grant: Grant
    since: float
    """When the owner's peer first saw it, in Unix seconds; before its invitation expired, if others did."""


class Roll:
    """Does what a member does for the roll; `turn` is called again and again.

    Args:
        node: of this peer.
        standing: of this peer.
        book: of the policy.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        node: Neighbour,
        standing: Standing,
        book: PolicyBook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._standing, self._book, self._clock = node, standing, book, clock
        self._certificate = standing.membership.certify(PeerID.from_base58(node.peer_id).to_bytes())
        self._publish_at = self._look_at = 0.0
        self._wire = b""

    def turn(self) -> None:
        """Publish, read, decide, as far as it is time for that.

        Raises:
            SwarmError: the DHT does not answer.
            SetupError: the policy has become too long.
            OSError: a file can't be written.
        """
        now = self._clock()
        if now >= self._publish_at:
            self._node.publish(members_key(), self._certificate + self._book.witnessed(), CERTIFICATE_TTL_S)
            learn_who_came(self._node, self._book, self._standing.membership.owner)
            self._publish_at = now + PUBLISH_EVERY_S
        if now >= self._look_at or self._book.wire != self._wire:  # decided on this machine a moment ago
            self._look_at = now + LOOK_EVERY_S
            self._look()

    def _look(self) -> None:
        if self._standing.owner is not None:
            self._keep(self._standing.owner)
        found = self._node.fetch(policy_key())
        for wire in found.values():
            self._book.offer(wire)
        self._wire = self._book.wire
        if self._wire and self._wire not in found.values():
            self._node.publish(policy_key(), self._wire, POLICY_TTL_S)

    def _keep(self, owner: Owner) -> None:
        assert self._standing.folder is not None
        there = read_members(self._node, owner.public)
        roll = write_down(self._standing.folder, there, self._book)
        self._book.decide(owner, partial(_with_those_who_came, there, roll))


def _with_those_who_came(there: Iterable[str], roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Have those stay whose invitation is not good for ever; one that is good for one peer is used then."""
    now = swarm_time()
    ids = {peer: PeerID.from_base58(peer).to_bytes() for peer in roll}
    staying = Counter(one.grant.key for peer, one in roll.items() if policy.keeps(ids[peer], one.grant))
    for peer, member in _by_age({peer: roll[peer] for peer in there if peer in roll}):
        grant, id_ = member.grant, ids[peer]
        is_closed = grant.era < policy.era or mark_of(grant.key) in policy.closed
        is_for_ever = not grant.is_once and not grant.expires and not is_closed
        if is_for_ever or policy.keeps(id_, grant) or policy.objection(id_, grant, min(now, member.since)):
            continue
        if staying[grant.key] >= MAX_ARRIVALS:
            continue
        used = {mark_of(grant.key)} if grant.is_once else set()
        if policy.room < 2:
            break
        staying[grant.key] += 1
        policy = replace(policy, stay=policy.stay | {mark_of(id_, grant.key)}, closed=policy.closed | used)
    return policy


def closing(keys: Iterable[bytes], roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Close invitations; whoever came by them stays, those that came first at first, as far as there is room.

    Args:
        keys: of the invitations.
        roll: all that came, by peer id.
        policy: the present one.
    """
    keys = frozenset(keys)
    there = {peer: one for peer, one in _admitted(roll, policy).items() if one.grant.key in keys}
    return _staying(there, replace(policy, closed=policy.closed | {mark_of(key) for key in keys}))


def closing_all(roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Close all invitations that were ever made; see `closing`."""
    there = _admitted(roll, policy)
    return _staying(there, replace(policy, era=policy.era + 1, closed=frozenset(), stay=frozenset()))


def lost(roll: Mapping[str, Member], before: Policy, after: Policy) -> set[str]:
    """Name the peers that are members by one policy and not by a later one."""
    return _admitted(roll, before).keys() - _admitted(roll, after).keys()


def _admitted(roll: Mapping[str, Member], policy: Policy) -> dict[str, Member]:
    return {
        peer: member
        for peer, member in roll.items()
        if not policy.objection(PeerID.from_base58(peer).to_bytes(), member.grant, member.since)
    }


def _staying(there: Mapping[str, Member], policy: Policy) -> Policy:
    marks = [mark_of(PeerID.from_base58(peer).to_bytes(), one.grant.key) for peer, one in _by_age(there)]
    more = [mark for mark in marks if mark not in policy.stay]
    return replace(policy, stay=policy.stay | frozenset(more[: max(0, policy.room)]))


def _by_age(roll: Mapping[str, Member]) -> list[tuple[str, Member]]:
    """List members, those that came first at first: names that a member made up later take nobody's place."""
    return sorted(roll.items(), key=lambda entry: (entry[1].since, entry[0]))


def without(peer: str, roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Take a peer out, and close the invitation that it came by: it could come back by it as another.

    Whether all others stay is for the caller to see; see `lost`.

    Args:
        peer: its id, base58.
        roll: all that came, by peer id.
        policy: the present one.
    """
    id_ = PeerID.from_base58(peer).to_bytes()
    others = {other: member for other, member in roll.items() if other != peer}
    if peer in roll:
        policy = replace(policy, stay=policy.stay - {mark_of(id_, roll[peer].grant.key)})
        return closing([roll[peer].grant.key], others, replace(policy, out=policy.out | {mark_of(id_)}))
    return replace(policy, out=policy.out | {mark_of(id_)})


def read_members(node: Neighbour, owner: bytes) -> dict[str, Grant]:
    """Fetch by what those that are there, or were lately, are members, by peer id.

    Raises:
        SwarmError: the DHT does not answer.
    """
    return {peer: grant for peer, (grant, _) in _read_entries(node, owner).items()}


def _read_entries(node: Neighbour, owner: bytes) -> dict[str, tuple[Grant, frozenset[bytes]]]:
    """Fetch by what peers are members, and the marks of those that each saw come in time, by peer id."""
    entries: dict[str, tuple[Grant, frozenset[bytes]]] = {}
    for peer, entry in node.fetch(members_key()).items():
        certificate = entry[:CERTIFICATE_BYTES] if isinstance(entry, bytes) else b""
        grant = certified(owner, PeerID.from_base58(peer).to_bytes(), certificate)
        if grant is not None:
            entries[peer] = grant, marks_in(entry[CERTIFICATE_BYTES:])
        else:
            disbelieve(peer, "the certificate that it publishes is not good")
    return entries


def learn_who_came(node: Neighbour, book: PolicyBook, owner: bytes) -> None:
    """Note whom others saw come before its invitation expired.

    Those are believed that can let others in: a lie does no more than handing their invitation on would.

    Args:
        node: of this peer.
        book: where it is noted.
        owner: public key of the swarm's.

    Raises:
        SwarmError: the DHT does not answer.
        OSError: it can't be written.
    """
    policy, now = book.policy, swarm_time()
    found = _read_entries(node, owner)
    witnessed = {
        mark
        for grant, marks in found.values()
        if grant.role is Role.member and not grant.is_once and not policy.objection(b"", grant, now)
        for mark in marks
    }
    for peer, (grant, _) in found.items():
        id_ = PeerID.from_base58(peer).to_bytes()
        if grant.expires and mark_of(id_, grant.key) in witnessed:
            book.note_arrival(id_, grant)


def write_down(folder: Path, there: Mapping[str, Grant], book: PolicyBook) -> dict[str, Member]:
    """Add those who are there to the owner's roll, if there is room; return all of it.

    Args:
        folder: of the owner's run.
        there: by what each is a member, by peer id.
        book: has those who came before their invitations expired.

    Raises:
        OSError: it can't be written.
    """
    before, now = read_roll(folder), swarm_time()
    new: dict[str, Member] = {}
    for peer, grant in there.items():
        known = before.get(peer, _NOBODY)
        came_in_time = book.came_in_time(PeerID.from_base58(peer).to_bytes(), grant)
        if known.grant != grant or (came_in_time and known.since >= grant.expires):
            new[peer] = Member(grant, min(now, grant.expires - 1.0) if came_in_time else now)
    names: Counter[bytes] = Counter()
    roll: dict[str, Member] = {}
    for peer, member in _by_age(before | new):
        names[member.grant.key] += 1
        if names[member.grant.key] <= MAX_MEMBERS:
            roll[peer] = member
    if roll == before:
        return roll
    entries = {
        peer: {"grant": member.grant.to_bytes().hex(), "since": member.since} for peer, member in roll.items()
    }
    text = json.dumps({"version": VERSION, "members": entries}, indent=1) + "\n"
    write_private(folder / ROLL_FILE, text.encode())
    return roll


def read_roll(folder: Path) -> dict[str, Member]:
    """Read the owner's roll, by peer id; a file that is missing or torn is taken for an empty one."""
    try:
        content: Any = json.loads((folder / ROLL_FILE).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return {}
        return {
            str(PeerID.from_base58(peer)): Member(
                Grant.parse(bytes.fromhex(entry["grant"])), float(entry["since"])
            )
            for peer, entry in content["members"].items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


_NOBODY = Member(Grant(b""), 0.0)
