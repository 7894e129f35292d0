"""The roll of a closed swarm: its members, and what its owner has decided about them.

1. Each member publishes its certificate, with marks of the peers that it saw come before their invitations
   expired, and hands on the owner's policy (`MemberList`).
2. The owner's peer writes down who came by which invitation (`write_down`), and has those stay that came
   before theirs was closed, used or over.
3. What the owner does is a change from one policy to the next: `closing`, `without`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.identity import write_private
from trahiv_cli.swarm.membership import CERTIFICATE_BYTES, Grant, Membership, Owner, Role, certified
from trahiv_cli.swarm.policy import MAX_ARRIVALS, POLICY_FILE, Policy, PolicyBook, mark_of, marks_in
from trahiv_cli.swarm.records import disbelieve

if TYPE_CHECKING:
    from trahiv_cli.swarm.node import Node

ROLL_FILE = "members.json"  # in the owner's folder
VERSION = 1
MAX_MEMBERS = 1000  # by one invitation: names that a member makes up take no places of another one
LOOK_EVERY_S = 5.0  # for the policy, and where this is the owner's peer for the members
PUBLISH_EVERY_S = 60.0  # this peer's certificate; it then looks whom others saw come in time, too
CERTIFICATE_TTL_S = 600.0
POLICY_TTL_S = 120.0  # a member that finds no record of the policy that it knows stores one


def members_key() -> str:
    """Where members publish their certificates."""
    return "trahiv_members"


def policy_key() -> str:
    """Where members hand on the owner's policy."""
    return "trahiv_policy"


@dataclass(frozen=True)
class Credentials:
    """What a folder or a line says of a peer's membership in a closed swarm."""

    membership: Membership
    owner: Owner | None = None  # if this peer's user started the swarm
    folder: Path | None = None  # of the run, where the policy is kept; None: a visitor keeps nothing

    def book(self) -> PolicyBook:
        """Open the policy."""
        return PolicyBook(self.membership.owner, self.folder and self.folder / POLICY_FILE)


@dataclass(frozen=True)
class Member:
    """A peer that has come."""

    grant: Grant
    since: float  # when the owner's peer first saw it, in Unix seconds; or others, before its grant expired


class MemberList:
    """Does what a member does for the roll; `turn` is called again and again."""

    def __init__(
        self, node: Node, standing: Credentials, book: PolicyBook, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._standing, self._book, self._now = node, standing, book, now
        self._certificate = standing.membership.certify(_id(node.peer_id))
        self._publish_at = self._look_at = 0.0
        self._wire = b""

    def turn(self) -> None:
        """Publish, read and decide what is due; SetupError if the policy has become too long."""
        now, book, node, standing = self._now(), self._book, self._node, self._standing
        if now >= self._publish_at:
            node.publish(members_key(), self._certificate + book.witnessed(), CERTIFICATE_TTL_S)
            read_members(node, standing.membership.owner, book)
            self._publish_at = now + PUBLISH_EVERY_S
        if now < self._look_at and book.wire == self._wire:  # else it was decided here a moment ago
            return
        self._look_at = now + LOOK_EVERY_S
        if standing.owner is not None and standing.folder is not None:
            there = read_members(node, standing.owner.public)
            roll = write_down(standing.folder, there, book)
            book.decide(standing.owner, partial(_with_those_who_came, there, roll))
        found = node.fetch(policy_key()).values()
        for wire in found:
            book.offer(wire)
        self._wire = book.wire
        if self._wire and self._wire not in found:
            node.publish(policy_key(), self._wire, POLICY_TTL_S)


def _id(peer: str) -> bytes:
    return PeerID.from_base58(peer).to_bytes()


def _by_age(roll: Mapping[str, Member]) -> list[tuple[str, Member]]:
    """List members, the first to come first: names that a member made up later take nobody's place."""
    return sorted(roll.items(), key=lambda entry: (entry[1].since, entry[0]))


# -- what the owner decides -----------------------------------------------------------------------


def _with_those_who_came(there: Iterable[str], roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Have those stay whose invitation is not good for ever; one that is good for one peer is used then."""
    now = swarm_time()
    staying = Counter(one.grant.key for peer, one in roll.items() if policy.keeps(_id(peer), one.grant))
    for peer, member in _by_age({peer: roll[peer] for peer in there if peer in roll}):
        grant, id_ = member.grant, _id(peer)
        is_for_ever = not grant.is_once and not grant.expires and not policy.has_closed(grant)
        if is_for_ever or policy.keeps(id_, grant) or policy.objection(id_, grant, min(now, member.since)):
            continue
        if staying[grant.key] >= MAX_ARRIVALS or policy.room < 2:
            continue
        staying[grant.key] += 1
        used = {mark_of(grant.key)} if grant.is_once else set()
        policy = replace(policy, stay=policy.stay | {mark_of(id_, grant.key)}, closed=policy.closed | used)
    return policy


def closing(keys: Collection[bytes] | None, roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Close the invitations with these keys, or all (None); of who came by them, the first stay."""
    there = _admitted(roll, policy)
    if keys is None:
        policy = replace(policy, era=policy.era + 1, closed=frozenset(), stay=frozenset())
    else:
        there = {peer: one for peer, one in there.items() if one.grant.key in keys}
        policy = replace(policy, closed=policy.closed | {mark_of(key) for key in keys})
    marks = [mark_of(_id(peer), one.grant.key) for peer, one in _by_age(there)]
    more = [mark for mark in marks if mark not in policy.stay]
    return replace(policy, stay=policy.stay | frozenset(more[: max(0, policy.room)]))


def without(peer: str, roll: Mapping[str, Member], policy: Policy) -> Policy:
    """Take a peer (its id, base58) out, and close its invitation: it could come back by it as another."""
    changed = replace(policy, out=policy.out | {mark_of(_id(peer))})
    if peer not in roll:
        return changed
    key = roll[peer].grant.key
    others = {other: member for other, member in roll.items() if other != peer}
    return closing([key], others, replace(changed, stay=policy.stay - {mark_of(_id(peer), key)}))


def lost(roll: Mapping[str, Member], before: Policy, after: Policy) -> set[str]:
    """Name the peers that are members by one policy and not by a later one."""
    return _admitted(roll, before).keys() - _admitted(roll, after).keys()


def _admitted(roll: Mapping[str, Member], policy: Policy) -> dict[str, Member]:
    return {peer: one for peer, one in roll.items() if not policy.objection(_id(peer), one.grant, one.since)}


# -- who is there, and who was --------------------------------------------------------------------


def read_members(node: Node, owner: bytes, book: PolicyBook | None = None) -> dict[str, Grant]:
    """Fetch the grants of the members that are there, or were within ten minutes, by peer id.

    A book notes whom others saw come before its invitation expired; those are believed who can let others in.
    """
    grants: dict[str, Grant] = {}
    witnessed: set[bytes] = set()
    for peer, entry in node.fetch(members_key()).items():
        certificate = entry[:CERTIFICATE_BYTES] if isinstance(entry, bytes) else b""
        grant = certified(owner, _id(peer), certificate)
        if grant is None:
            disbelieve(peer, "the certificate that it publishes is not good")
            continue
        grants[peer] = grant
        lets_in = book is not None and grant.role is Role.member and not grant.is_once
        if book and lets_in and not book.policy.objection(b"", grant, swarm_time()):
            witnessed.update(marks_in(entry[CERTIFICATE_BYTES:]))
    for peer, grant in grants.items():
        if book is not None and grant.expires and mark_of(_id(peer), grant.key) in witnessed:
            book.note_arrival(_id(peer), grant)
    return grants


def write_down(folder: Path, there: Mapping[str, Grant], book: PolicyBook) -> dict[str, Member]:
    """Add those who are there (grants by peer id) to the roll in the owner's folder; return all of it."""
    before, now = read_roll(folder), swarm_time()
    new: dict[str, Member] = {}
    for peer, grant in there.items():
        known, came_in_time = before.get(peer), book.came_in_time(_id(peer), grant)
        if known is None or known.grant != grant or (came_in_time and known.since >= grant.expires):
            new[peer] = Member(grant, min(now, grant.expires - 1.0) if came_in_time else now)
    names: Counter[bytes] = Counter()
    roll: dict[str, Member] = {}
    for peer, member in _by_age(before | new):
        names[member.grant.key] += 1
        if names[member.grant.key] <= MAX_MEMBERS:
            roll[peer] = member
    if roll != before:
        entries = {peer: {"grant": m.grant.to_bytes().hex(), "since": m.since} for peer, m in roll.items()}
        text = json.dumps({"version": VERSION, "members": entries}, indent=1) + "\n"
        write_private(folder / ROLL_FILE, text.encode())
    return roll


def read_roll(folder: Path) -> dict[str, Member]:
    """Read the owner's roll, by peer id; a file that is missing or torn counts as an empty one."""
    try:
        content: Any = json.loads((folder / ROLL_FILE).read_text(encoding="utf-8"))
        entries = content["members"].items() if content["version"] == VERSION else ()
        read = {
            peer: (Grant.parse(bytes.fromhex(one["grant"])), float(one["since"])) for peer, one in entries
        }
        return {str(PeerID.from_base58(peer)): Member(*one) for peer, one in read.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
