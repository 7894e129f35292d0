"""The member list of a closed swarm, and its owner's decisions about members.

1. Each member publishes its certificate, and passes on the owner's policy: through the DHT (`MemberList`),
   and with each refusal of a call that the policy causes. So the policy takes effect within seconds, whether
   or not the owner's peer runs.
2. The owner's peer records which peer joined with which invitation (`write_down`). It lets peers stay that
   joined with an invitation that expires or is for one peer (`synchronize`).
3. The owner's commands are changes from one policy to the next: `closing`, `without`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trahiv_cli.errors import SetupError
from trahiv_cli.files import write_private
from trahiv_cli.members.identity import id_bytes
from trahiv_cli.members.membership import (
    CERTIFICATE_BYTES,
    MAX_MARKS,
    Grant,
    Policy,
    certified,
    mark_of,
)
from trahiv_cli.members.policy_book import Credentials
from trahiv_cli.members.records import ignore_peer

if TYPE_CHECKING:
    from trahiv_cli.swarm.dht import Dht

MEMBERS_KEY = "trahiv_members"  # where members publish their certificates
POLICY_KEY = "trahiv_policy"  # where they publish the owner's policy
ROLL_FILE = "members.json"  # in the owner's folder
# The owner's list: the grants with which peers (ids in base58) joined, in order of arrival. So ids that a
# member makes up later displace no peer.
Roll = Mapping[str, Grant]


# -- exchange between members ----------------------------------------------------------------------


class MemberList:
    """Publishes a member's certificate, and exchanges the policy with other members.

    `Node` makes one in a closed swarm, and calls `turn` every few seconds as long as it runs.
    """

    def __init__(self, dht: Dht, credentials: Credentials, now: Callable[[], float] = time.monotonic) -> None:
        self._dht = dht
        self._credentials = credentials
        self._now = now
        self._publish_at = self._look_at = 0.0

    def turn(self) -> None:
        """Publish, fetch and decide as far as due; raise SetupError if the policy becomes too long."""
        now = self._now()
        if now >= self._publish_at:
            certificate = self._credentials.membership.certify(id_bytes(self._dht.peer_id))
            self._dht.publish(MEMBERS_KEY, certificate, ttl_s=600.0)
            self._publish_at = now + 60.0
        if now >= self._look_at:
            self._look_at = now + 5.0
            synchronize(self._dht, self._credentials)


def synchronize(dht: Dht, credentials: Credentials) -> bool:
    """Fetch the owner's policy and pass it on; with the owner's key, also decide which new members stay.

    Returns whether a peer of the DHT has the policy, if there is one. Raises SetupError if it becomes too
    long.
    """
    book = credentials.book
    found = list(dht.fetch(POLICY_KEY).values())
    for wire in found:
        book.offer(wire)
    if credentials.owner is not None and credentials.folder is not None:
        roll = write_down(credentials.folder, read_members(dht, credentials.owner.public))
        book.decide(credentials.owner, partial(_with_those_who_came, roll))
    return not book.wire or book.wire in found or dht.publish(POLICY_KEY, book.wire, ttl_s=120.0)


# -- decisions of the owner ------------------------------------------------------------------------


def _with_those_who_came(roll: Roll, policy: Policy) -> Policy:
    """Let peers stay whose invitation expires or is for one peer; close the latter as used."""
    staying = Counter(grant.key for peer, grant in roll.items() if policy.keeps(id_bytes(peer), grant))
    for peer, grant in roll.items():
        id_ = id_bytes(peer)
        # Ids that a member makes up must leave room for peers with other invitations.
        has_room = staying[grant.key] < MAX_MARKS // 2 and policy.room >= 2
        is_for_ever = not grant.is_once and not grant.expires
        if is_for_ever or not has_room or policy.keeps(id_, grant) or policy.objection(id_, grant):
            continue
        staying[grant.key] += 1
        used = {mark_of(grant.key)} if grant.is_once else set()
        policy = replace(policy, stay=policy.stay | {mark_of(id_, grant.key)}, closed=policy.closed | used)
    return policy


def closing(keys: Collection[bytes] | None, roll: Roll, policy: Policy) -> Policy:
    """Close the invitations with these keys, or all (None); the first peers that joined with them stay."""
    came_by = [(id_bytes(peer), grant) for peer, grant in roll.items() if keys is None or grant.key in keys]
    marks = [mark_of(id_, grant.key) for id_, grant in came_by if not policy.objection(id_, grant)]
    if keys is None:
        policy = replace(policy, era=policy.era + 1, closed=frozenset(), stay=frozenset())
    else:
        policy = replace(policy, closed=policy.closed | {mark_of(key) for key in keys})
    more = [mark for mark in marks if mark not in policy.stay]
    return replace(policy, stay=policy.stay | frozenset(more[: max(0, policy.room)]))


def without(peer: str, roll: Roll, policy: Policy) -> Policy:
    """Remove a peer (id in base58), and close its invitation: with it, the peer could return as another.

    Raises SetupError if there is no room to let all other peers of that invitation stay.
    """
    changed = replace(policy, out=policy.out | {mark_of(id_bytes(peer))})
    if peer not in roll:
        return changed
    key = roll[peer].key
    changed = closing([key], roll, replace(changed, stay=policy.stay - {mark_of(id_bytes(peer), key)}))
    others = [(id_bytes(other), grant) for other, grant in roll.items() if other != peer]
    if lost := sum(not policy.objection(*one) and bool(changed.objection(*one)) for one in others):
        raise SetupError(
            f"{lost} others that joined with the same invitation could not stay: a policy has room for "
            f"{MAX_MARKS} decisions; nothing was changed.",
            hint="first type `trahiv invite --close all`: the first members stay, as far as there is "
            "room, and the others join again with the line that it prints; then kick this peer",
        )
    return changed


# -- the member list -------------------------------------------------------------------------------


def read_members(dht: Dht, owner: bytes) -> dict[str, Grant]:
    """Fetch the grants, by peer id, of members that were present within the last ten minutes."""
    grants = {}
    for peer, entry in dht.fetch(MEMBERS_KEY).items():
        shown = entry[:CERTIFICATE_BYTES] if isinstance(entry, bytes) else b""  # earlier versions add marks
        grant = certified(owner, id_bytes(peer), shown)
        if grant is None:
            ignore_peer(peer, "the certificate that it publishes is not good")
        else:
            grants[peer] = grant
    return grants


def write_down(folder: Path, there: Mapping[str, Grant]) -> Roll:
    """Add present members to the list in the owner's folder; return the whole list."""
    before = read_roll(folder)
    known = {peer: grant for peer, grant in before.items() if there.get(peer, grant) == grant}
    names: Counter[bytes] = Counter()
    roll = {}
    for peer, grant in {**known, **there}.items():
        names[grant.key] += 1
        if names[grant.key] <= 1000:  # ids that a member makes up displace no peer of another invitation
            roll[peer] = grant
    if roll != before:
        entries = {peer: {"grant": grant.to_bytes().hex()} for peer, grant in roll.items()}
        text = json.dumps({"version": 1, "members": entries}, indent=1) + "\n"
        write_private(folder / ROLL_FILE, text.encode())
    return roll


def read_roll(folder: Path) -> Roll:
    """Read the owner's member list; a missing or damaged file counts as an empty list."""
    try:
        content = json.loads((folder / ROLL_FILE).read_text(encoding="utf-8"))
        entries = content["members"].items() if content["version"] == 1 else ()
        return {peer: Grant.parse(bytes.fromhex(one["grant"])) for peer, one in entries if id_bytes(peer)}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
