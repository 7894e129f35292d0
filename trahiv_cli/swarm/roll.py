"""The roll of a closed swarm: its members, and what its owner has decided about them.

1. Each member publishes its certificate, and hands on the owner's policy by the DHT (`MemberList`), and with
   each refusal of a call that it is the reason of. So it takes effect within seconds, whether or not the
   owner's peer runs. It is kept in each run's folder, where all processes of a peer look (`PolicyBook`).
2. The owner's peer writes down who came by which invitation (`write_down`), and has those stay that came by
   one that expires, or is for one peer (`synchronize`).
3. What the owner does is a change from one policy to the next: `closing`, `without`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.files import write_private
from trahiv_cli.swarm.membership import (
    CERTIFICATE_BYTES,
    MAX_MARKS,
    Grant,
    Membership,
    Owner,
    Policy,
    certified,
    mark_of,
)
from trahiv_cli.swarm.records import disbelieve

if TYPE_CHECKING:
    from trahiv_cli.swarm.node import Node

MEMBERS_KEY = "trahiv_members"  # where members publish their certificates
POLICY_KEY = "trahiv_policy"  # where they hand on the owner's policy
POLICY_FILE = "policy"  # in a run's folder
POLICY_LOOK_EVERY_S = 0.5  # how often a process looks whether that file has changed
ROLL_FILE = "members.json"  # in the owner's folder
VERSION = 1
# Peers by one invitation that stay when it expires: names that a member makes up must leave room for those
# who come by other invitations.
MAX_STAYING = MAX_MARKS // 2
MAX_MEMBERS = 1000  # by one invitation: names that a member makes up take no places of another one
LOOK_EVERY_S = 5.0  # for the policy, and where this is the owner's peer for the members
PUBLISH_EVERY_S = 60.0  # this peer's certificate
CERTIFICATE_TTL_S = 600.0
POLICY_TTL_S = 120.0  # a member that finds no record of the policy that it knows stores one

# The owner's: the grants by which peers (ids, base58) came, the first to come first. So names that a member
# made up later take nobody's place.
Roll = Mapping[str, Grant]


@dataclass(frozen=True)
class Credentials:
    """What a folder or a line says of a peer's membership in a closed swarm."""

    membership: Membership
    owner: Owner | None = None  # if this peer's user started the swarm
    folder: Path | None = None  # of the run, where the policy is kept; None: a visitor keeps nothing

    def book(self) -> PolicyBook:
        """Open the policy."""
        return PolicyBook(self.membership.owner, self.folder and self.folder / POLICY_FILE)


# -- what was decided -----------------------------------------------------------------------------


class PolicyBook:
    """The newest policy that this peer knows of.

    All processes of the peer share its file; without one it is only in memory.
    """

    def __init__(self, owner: bytes, path: Path | None = None) -> None:
        self._owner = owner
        self._path = path
        self._looked_at = -POLICY_LOOK_EVERY_S
        self._policy = Policy()
        self._wire = b""
        self._kept = b""  # what stood in the file at the last look
        self._seen = Policy()  # the same, with the decisions of the policies that it has overtaken

    @property
    def policy(self) -> Policy:
        """The newest that is known; an empty one if the owner has decided nothing."""
        self._look()
        return self._policy

    @property
    def wire(self) -> bytes:
        """The same as the owner signed it; empty if there is none."""
        self._look()
        return self._wire

    def offer(self, wire: object) -> None:
        """Take a policy over if it is the owner's and newer.

        Here it counts even after OSError; it is written when it is offered again.
        """
        self._look()
        self._take(wire)
        if self._path is not None and wire == self._wire != self._kept:
            with _locked(self._path.parent):
                self._look(at_once=True)  # another process may have written it, or a newer one, by now
                if wire == self._wire != self._kept:
                    write_private(self._path, self._wire)

    def decide(self, owner: Owner, change: Callable[[Policy], Policy]) -> bytes:
        """Change, number and sign the policy in the owner's folder; return it as it goes to the others.

        What the owner decided from another copy of the folder, and this book was offered, is added first.
        SetupError if it has become too long, OSError if the file can't be written; nothing was changed then.
        """
        assert self._path is not None
        with _locked(self._path.parent):
            self._look(at_once=True)
            changed = change(self._policy.with_those_of(self._seen))
            if changed != self._policy:
                wire = replace(changed, serial=self._policy.serial + 1).to_bytes(owner)
                write_private(self._path, wire)
                self._take(wire)
            return self._wire

    def _take(self, wire: object) -> None:
        with contextlib.suppress(ValueError):
            policy = Policy.parse(wire, self._owner)
            older, newer = sorted((policy, self._seen), key=lambda one: one.serial)
            self._seen = newer.with_those_of(older)
            if policy.serial > self._policy.serial:
                assert isinstance(wire, bytes)
                self._policy = policy
                self._wire = wire

    def _look(self, *, at_once: bool = False) -> None:
        """Read what other processes of this peer have written since the last look."""
        now = time.monotonic()
        if self._path is None or (now < self._looked_at + POLICY_LOOK_EVERY_S and not at_once):
            return
        self._looked_at = now
        with contextlib.suppress(OSError):
            if (kept := self._path.read_bytes()) != self._kept:
                self._kept = kept
                self._take(kept)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the files of a folder; they ask in the same way."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


# -- who is there, and who was --------------------------------------------------------------------


class MemberList:
    """Does what a member does for the roll; `turn` is called again and again."""

    def __init__(
        self, node: Node, standing: Credentials, book: PolicyBook, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._standing = standing
        self._book = book
        self._now = now
        self._publish_at = self._look_at = 0.0

    def turn(self) -> None:
        """Publish, read and decide what is due; SetupError if the policy has become too long."""
        now = self._now()
        if now >= self._publish_at:
            certificate = self._standing.membership.certify(_id(self._node.peer_id))
            self._node.publish(MEMBERS_KEY, certificate, CERTIFICATE_TTL_S)
            self._publish_at = now + PUBLISH_EVERY_S
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            synchronize(self._node, self._standing, self._book)


def synchronize(node: Node, standing: Credentials, book: PolicyBook) -> bool:
    """Learn the owner's policy and hand it on; with the owner's key, decide who stays of those who came.

    Say whether a peer of the DHT has it. SetupError if it has become too long.
    """
    found = list(node.fetch(POLICY_KEY).values())
    for wire in found:
        book.offer(wire)
    if standing.owner is not None and standing.folder is not None:
        roll = write_down(standing.folder, read_members(node, standing.owner.public))
        book.decide(standing.owner, partial(_with_those_who_came, roll))
    return not book.wire or book.wire in found or node.publish(POLICY_KEY, book.wire, POLICY_TTL_S)


def _id(peer: str) -> bytes:
    return PeerID.from_base58(peer).to_bytes()


# -- what the owner decides -----------------------------------------------------------------------


def _with_those_who_came(roll: Roll, policy: Policy) -> Policy:
    """Have those stay whose invitation expires, or is for one peer, and is used then."""
    staying = Counter(grant.key for peer, grant in roll.items() if policy.keeps(_id(peer), grant))
    for peer, grant in roll.items():
        id_ = _id(peer)
        has_room = staying[grant.key] < MAX_STAYING and policy.room >= 2
        is_for_ever = not grant.is_once and not grant.expires
        if is_for_ever or not has_room or policy.keeps(id_, grant) or policy.objection(id_, grant):
            continue
        staying[grant.key] += 1
        used = {mark_of(grant.key)} if grant.is_once else set()
        policy = replace(policy, stay=policy.stay | {mark_of(id_, grant.key)}, closed=policy.closed | used)
    return policy


def closing(keys: Collection[bytes] | None, roll: Roll, policy: Policy) -> Policy:
    """Close the invitations with these keys, or all (None); of who came by them, the first stay."""
    came_by = [(_id(peer), grant) for peer, grant in roll.items() if keys is None or grant.key in keys]
    marks = [mark_of(id_, grant.key) for id_, grant in came_by if not policy.objection(id_, grant)]
    if keys is None:
        policy = replace(policy, era=policy.era + 1, closed=frozenset(), stay=frozenset())
    else:
        policy = replace(policy, closed=policy.closed | {mark_of(key) for key in keys})
    more = [mark for mark in marks if mark not in policy.stay]
    return replace(policy, stay=policy.stay | frozenset(more[: max(0, policy.room)]))


def without(peer: str, roll: Roll, policy: Policy) -> Policy:
    """Take a peer (its id, base58) out, and close its invitation: it could come back by it as another.

    SetupError if there is no room to let all others stay that came by it.
    """
    changed = replace(policy, out=policy.out | {mark_of(_id(peer))})
    if peer not in roll:
        return changed
    key = roll[peer].key
    changed = closing([key], roll, replace(changed, stay=policy.stay - {mark_of(_id(peer), key)}))
    others = [(_id(other), grant) for other, grant in roll.items() if other != peer]
    if lost := sum(not policy.objection(*one) and bool(changed.objection(*one)) for one in others):
        raise SetupError(
            f"{lost} others that joined with the same invitation could not stay: a policy has room for "
            f"{MAX_MARKS} decisions; nothing was changed.",
            hint="first type `trahiv invite --close all`: those who came first stay, as far as there is "
            "room, and the others join again with the line that it prints; then kick this peer",
        )
    return changed


# -- who came ---------------------------------------------------------------------------------------


def read_members(node: Node, owner: bytes) -> dict[str, Grant]:
    """Fetch the grants of the members that are there, or were within ten minutes, by peer id."""
    grants: dict[str, Grant] = {}
    for peer, entry in node.fetch(MEMBERS_KEY).items():
        shown = entry[:CERTIFICATE_BYTES] if isinstance(entry, bytes) else b""  # earlier versions add marks
        grant = certified(owner, _id(peer), shown)
        if grant is None:
            disbelieve(peer, "the certificate that it publishes is not good")
        else:
            grants[peer] = grant
    return grants


def write_down(folder: Path, there: Mapping[str, Grant]) -> Roll:
    """Add those who are there to the roll in the owner's folder; return all of it."""
    before = read_roll(folder)
    known = {peer: grant for peer, grant in before.items() if there.get(peer, grant) == grant}
    names: Counter[bytes] = Counter()
    roll: dict[str, Grant] = {}
    for peer, grant in {**known, **there}.items():
        names[grant.key] += 1
        if names[grant.key] <= MAX_MEMBERS:
            roll[peer] = grant
    if roll != before:
        entries = {peer: {"grant": grant.to_bytes().hex()} for peer, grant in roll.items()}
        text = json.dumps({"version": VERSION, "members": entries}, indent=1) + "\n"
        write_private(folder / ROLL_FILE, text.encode())
    return roll


def read_roll(folder: Path) -> Roll:
    """Read the owner's roll; a file that is missing or torn counts as an empty one."""
    try:
        content: Any = json.loads((folder / ROLL_FILE).read_text(encoding="utf-8"))
        entries = content["members"].items() if content["version"] == VERSION else ()
        return {peer: Grant.parse(bytes.fromhex(one["grant"])) for peer, one in entries if _id(peer)}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
