"""The owner's commands for a closed swarm, from a run's folder, whether or not a peer runs there.

A command visits the swarm first (`synchronize`), then changes the policy in the folder, and publishes it by
another visit. A peer of that folder does the same every few seconds.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trahiv_cli.clock import swarm_time
from trahiv_cli.errors import SetupError, SwarmError, Unreachable
from trahiv_cli.files import INVITATION_FILE, INVITED_BY_FILE, MEMBER_FILE, OWNER_FILE
from trahiv_cli.members.identity import IDENTITY_FILE, ensure_identity, id_bytes
from trahiv_cli.members.invitation import (
    Invitation,
    keep_invitation,
    read_invitation,
    read_owner,
    visitor_credentials,
)
from trahiv_cli.members.membership import Grant, Policy, Role
from trahiv_cli.members.policy_book import POLICY_FILE, Credentials, PolicyBook
from trahiv_cli.net.addresses import are_refused, knock_at_all, require_peer_address, unreachable
from trahiv_cli.swarm import member_list as roll
from trahiv_cli.swarm.known_peers import FILE, KnownPeers

if TYPE_CHECKING:
    from trahiv_cli.swarm.node import Node

GIVEN_FOLDER = "invitations"  # in the owner's folder: the invitations made there, by id


class OwnedSwarm:
    """The folder of a run whose swarm this user owns. Raises SetupError if it has no owner's key.

    Each owner's command makes one, and so does each action on the page of `trahiv watch`.
    """

    def __init__(self, folder: Path) -> None:
        owner = read_owner(folder)
        if owner is None:
            raise SetupError(
                f"The swarm of {folder} is not yours, or open; nothing was changed.",
                hint="name the folder of a run that you started: --output-dir DIR; members hand on "
                "@DIR/invitation",
            )
        self.folder = folder
        self.owner = owner
        self.book = PolicyBook(owner.public, folder / POLICY_FILE)

    @property
    def _home(self) -> Invitation:
        """The invitation that the peer of this folder gives to others."""
        path = self.folder / INVITATION_FILE
        if not path.exists():
            raise SetupError(
                f"{self.folder} does not say where its peer can be reached; nothing was changed.",
                hint=f"start the peer once: trahiv init RECIPE --output-dir {self.folder}",
            )
        return read_invitation([f"@{path}"])

    def invite(self, role: Role, *, is_once: bool, lasts_s: float | None) -> tuple[Grant, Path]:
        """Make an invitation and write it into a private file; `lasts_s` None: it never expires."""
        expires = 0 if lasts_s is None else int(swarm_time() + lasts_s)
        membership = self.owner.invite(role, is_once=is_once, expires=expires, era=self.book.policy.era)
        path = (self.folder / GIVEN_FOLDER / membership.grant.id).resolve()
        keep_invitation(path, replace(self._home, membership=membership))
        return membership.grant, path

    def given(self) -> list[Grant]:
        """Return the grants of the open invitations, newest first."""
        paths = [self.folder / INVITATION_FILE, *(self.folder / GIVEN_FOLDER).glob("*")]
        there = sorted(filter(Path.exists, paths), key=lambda path: path.stat().st_mtime, reverse=True)
        found = [read_invitation([f"@{path}"]).membership for path in there]
        return [one.grant for one in found if one is not None and self._is_open(one.grant)]

    def close(self, id_: str | None) -> None:
        """Close an invitation, or all of them (None); the first peers that joined with it stay.

        Raises SetupError if no open invitation has that id.
        """
        came = roll.read_roll(self.folder)
        keys = None
        if id_ is not None:
            known = [*self.given(), *came.values()]
            keys = {grant.key for grant in known if grant.id == id_ and self._is_open(grant)}
            if not keys:
                raise SetupError(
                    f"There is no invitation {id_} that is open; nothing was changed.",
                    hint="`trahiv members` lists the open ones",
                )
        self._decide(partial(roll.closing, keys, came))

    def _is_open(self, grant: Grant) -> bool:
        return not self.book.policy.objection(b"", grant)

    def find(self, word: str) -> str:
        """Return the id of a peer, given its id or the end of a member's id.

        Raises SetupError if no member or several match, or if it is this folder's own peer.
        """
        word = word.removeprefix("...")  # see `short_name`
        found = [peer for peer in roll.read_roll(self.folder) if len(word) >= 4 and peer.endswith(word)]
        with suppress(ValueError):
            if not found and len(id_bytes(word)) in (34, 38):
                found = [word]
        if len(found) != 1:
            raise SetupError(
                f"{word} is the id of {'no member' if not found else f'{len(found)} members'}; "
                "nothing was changed.",
                hint="`trahiv members` lists them; the last six characters of an id are enough",
            )
        key = self.folder / IDENTITY_FILE
        if key.exists() and found[0] == ensure_identity(key):
            raise SetupError(
                f"{word} is this folder's own peer; nothing was changed.",
                hint="to stop it, press Ctrl-C where it runs",
            )
        return found[0]

    def take_out(self, peer: str) -> bool:
        """Remove a peer (id in base58), and close the invitation that it joined with, if that is known.

        Returns whether it is known. Raises SetupError if the policy has no room for all other peers of that
        invitation; nothing was changed then.
        """
        came = roll.read_roll(self.folder)
        self._decide(partial(roll.without, peer, came))
        return peer in came

    def _decide(self, change: Callable[[Policy], Policy]) -> None:
        home = self._home
        self.book.decide(self.owner, change)
        if home.membership is not None and not self._is_open(home.membership.grant):
            # This folder's peer has a closed invitation: it gets a new one for itself and for others.
            fresh = self.owner.invite(era=self.book.policy.era)
            keep_invitation(self.folder / MEMBER_FILE, Invitation(membership=fresh))
            keep_invitation(self.folder / INVITATION_FILE, replace(home, membership=fresh))

    def synchronize(self) -> bool:
        """Fetch new members and decisions made elsewhere, and publish the decisions made here.

        Returns whether a peer of the swarm answered and has the policy.
        """
        invited = self.owner.invite(era=self.book.policy.era)
        visitor = Credentials(invited, self.owner, self.folder)
        addresses = _addresses_of(self._home)
        met = KnownPeers.remembered(self.folder / FILE)
        with suppress(SwarmError), visiting(addresses, visitor, met) as node:
            return roll.synchronize(node, visitor)
        return False


def _addresses_of(invitation: Invitation) -> list[str]:
    """Return the addresses in an invitation of this machine's peer, behind their loopback variants.

    On the peer's own machine, its public address may not work, and its others may have changed since it
    started.
    """
    over_tcp = [address for address in invitation.addresses if "/tcp/" in address]
    here = [re.sub("^/[^/]+/[^/]+", "/ip4/127.0.0.1", address) for address in over_tcp]
    return [*here, *invitation.addresses]


def list_members(folder: Path | None, invitation: Invitation) -> list[dict[str, Any]]:
    """List the members that are present and, for the owner, earlier ones, by a run's folder or an invitation.

    Returns an event's fields for each: whether it was present within the last ten minutes, and why it is not
    a member any more, or None. Raises SetupError if the swarm is open; Unreachable and NotAdmitted as `Node`
    does.
    """
    credentials = visitor_credentials(folder, invitation)
    if credentials is None:
        raise SetupError(
            "An open swarm has no members, only peers; nothing was changed.",
            hint="its peers are in the live view of each",
        )
    own = visitor_credentials(folder, Invitation())
    if own is None or own.membership.owner != credentials.membership.owner:
        folder = None  # it is of another swarm: its policy and member list do not apply
    credentials = replace(credentials, folder=folder)
    with looking_in(folder, invitation, credentials) as node:
        there = roll.read_members(node, credentials.membership.owner)
    policy = credentials.book.policy
    known = roll.read_roll(folder) if folder else {}
    return [
        {
            "peer_id": peer,
            "invitation": grant.id,
            "role": grant.role.name,
            "is_there": peer in there,
            "objection": policy.objection(id_bytes(peer), grant) or None,
        }
        for peer, grant in {**known, **there}.items()
    ]


@contextmanager
def looking_in(
    folder: Path | None, invitation: Invitation, credentials: Credentials | None
) -> Iterator[Node]:
    """Visit a swarm at the addresses in an invitation and in a run's folder.

    Raises Unreachable and NotAdmitted as `Node` does.
    """
    addresses = list(invitation.addresses)
    for path in (folder / INVITATION_FILE, folder / INVITED_BY_FILE) if folder else ():
        if path.exists():
            found = read_invitation([f"@{path}"])
            addresses += _addresses_of(found) if path.name == INVITATION_FILE else found.addresses
    met = KnownPeers.remembered(folder and folder / FILE)
    addresses = addresses or [maddr for maddrs in met.addresses.values() for maddr in maddrs]
    if not addresses:
        raise Unreachable(
            f"{folder} does not say where any peer is; nothing was changed.",
            hint="name a peer: --peer ADDR",
        )
    with visiting(addresses, credentials, met) as node:
        yield node


@contextmanager
def visiting(
    peers: Sequence[str], credentials: Credentials | None, met: KnownPeers, identity: Path | None = None
) -> Iterator[Node]:
    """Visit a swarm, to look at it or to hand something over; nothing of the visitor remains.

    `met` may have current addresses. `identity` is the key file of a peer that may be admitted when others
    are not; None: a new one. Raises Unreachable and NotAdmitted as `Node` does, and before it loads heavy
    libraries if all addresses refuse connections.
    """
    for address in peers:
        require_peer_address(address)
    if peers and are_refused([*peers, *chain.from_iterable(met.addresses.values())]):
        raise unreachable(knock_at_all(peers))
    from trahiv_cli.recipe.schema import DhtSection
    from trahiv_cli.swarm.node import Node

    section = DhtSection(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=True, nat_port_map=False, auto_nat=False
    )
    with tempfile.TemporaryDirectory(prefix="trahiv-visitor-", ignore_cleanup_errors=True) as passing:
        identity = identity or Path(passing, "identity.key")
        with Node(section, identity, tuple(peers), met=met, credentials=credentials, is_visitor=True) as node:
            yield node


def own_folder(file: str = OWNER_FILE) -> Path:
    """Return the newest folder in `runs` that contains `file`; raise SetupError if there is none."""
    there = [path.parent for path in Path("runs").glob(f"*/{file}")]
    if not there:
        raise SetupError(
            "There is no run of yours in runs/; nothing was changed.",
            hint="name its folder: --output-dir DIR",
        )
    return max(there, key=lambda folder: folder.stat().st_mtime)
