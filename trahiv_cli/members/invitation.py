"""Invitations: one line with the peers' addresses, the run, and the secret of a closed swarm.

The line contains a MessagePack list in the format of `recipe/pasted.py`. Every reader of the line can join,
so it is written only into private files and onto a person's screen.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import base58

from trahiv_cli.errors import NotAdmitted, SetupError, Unreachable
from trahiv_cli.files import INVITATION_FILE, MEMBER_FILE, OWNER_FILE, require_private, write_private
from trahiv_cli.members.identity import id_bytes
from trahiv_cli.members.membership import KEY_BYTES, Membership, Owner, Role
from trahiv_cli.members.policy_book import POLICY_FILE, Credentials, PolicyBook
from trahiv_cli.net.addresses import is_address_of, reach_of
from trahiv_cli.net.borrowed.multiaddr import Multiaddr
from trahiv_cli.recipe.pasted import INVITATION_PREFIX, content_of, invitation_of, peers_in
from trahiv_cli.wire import packed, unpacked

Secret = TypeVar("Secret")

MAX_CHARS = 2048


@dataclass(frozen=True)
class Invitation:
    """Addresses of a swarm's peers, the membership that a newcomer gets, and the run."""

    addresses: tuple[str, ...] = ()  # multiaddrs that end in `/p2p/<peer id>`
    membership: Membership | None = field(default=None, repr=False)  # None: the swarm is open
    run_id: str = ""  # empty: any run
    fingerprint: str = ""  # of the run, or its beginning; empty: any recipe

    def to_text(self) -> str:
        """Return the invitation as one line; `parse` reads it."""
        places: dict[str, list[bytes]] = {}
        for address in self.addresses:
            place, _, peer = address.rpartition("/p2p/")
            places.setdefault(peer, []).append(Multiaddr(place).to_bytes())
        parts = self.membership.to_parts() if self.membership is not None else []
        # The line must be short enough to paste: it has the four furthest-reaching addresses of each peer.
        found = [[id_bytes(peer), some[:4]] for peer, some in places.items()]
        # These characters tell runs apart, and show a changed recipe.
        fingerprint = bytes.fromhex(self.fingerprint[:16])
        return invitation_of(packed([found, parts, self.run_id, fingerprint]))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a line from `to_text`; raise Unreachable if it is damaged or incomplete."""
        try:
            content = content_of(text)
            if content is None or len(text) > MAX_CHARS:
                raise ValueError("not an invitation, or mistyped")
            said: Any = unpacked(content)
            match said:
                case [[*peers], [*parts], str(run_id), bytes(fingerprint)]:
                    ids = ((base58.b58encode(peer).decode(), places) for peer, places in peers)
                    found = {f"{Multiaddr(place)}/p2p/{id_}": id_ for id_, places in ids for place in places}
                    if not all(is_address_of(peer, address) for address, peer in found.items()):
                        raise ValueError("not the addresses of a peer")
                    membership = Membership.from_parts(parts) if parts else None
                    return cls(tuple(found), membership, run_id, fingerprint.hex())
            raise ValueError("of another version")
        except (ValueError, TypeError, LookupError) as error:
            raise Unreachable(
                "The invitation is damaged, or not complete.",
                hint="copy the whole line that `trahiv init` printed, and put it in quotes if it is broken "
                'into several: trahiv join "trahiv1:..."',
            ) from error


def read_invitation(texts: Sequence[str]) -> Invitation:
    """Parse the values of `--peer`: invitations, multiaddrs and `@FILE`, however they were pasted.

    The result has all addresses; every other field is from the first invitation that has it.

    Raises:
        Unreachable: an invitation is damaged.
        NotAdmitted: two of them are to different swarms.
        SetupError: a file can't be read, or is readable by other users.
    """
    found = Invitation()
    for line in (line for text in texts for line in _lines(text)):
        one = Invitation.parse(line) if line.startswith(INVITATION_PREFIX) else Invitation((line,))
        if found.membership and one.membership and found.membership.owner != one.membership.owner:
            raise NotAdmitted(
                "The invitations are of different swarms; nothing was changed.", hint="take one of them"
            )
        found = Invitation(
            tuple(dict.fromkeys((*found.addresses, *one.addresses))),
            found.membership or one.membership,
            found.run_id or one.run_id,
            found.fingerprint or one.fingerprint,
        )
    return found


def _lines(text: str) -> Iterator[str]:
    """Yield the invitations and multiaddrs in a text, and in the file that it names."""
    for one in [text] if text.startswith("@") else peers_in(text) or [text]:
        if not one.startswith("@"):
            yield one
            continue
        path = Path(one[1:])
        try:
            require_private(path)
            with path.open(encoding="utf-8") as file:
                content = file.read(2 * MAX_CHARS)
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(
                f"The invitation in {path} can't be read: {error}.",
                hint="after --peer @ stands a file with the line that `trahiv init` printed",
            ) from error
        yield from (line for line in peers_in(content) if not line.startswith("@"))


def visitor_credentials(folder: Path | None, invitation: Invitation) -> Credentials | None:
    """Return the credentials for a read-only visit, or None if there are none. Writes no file."""
    membership = invitation.membership
    if membership is None and folder is not None:
        path = folder / MEMBER_FILE
        membership = _read_secret(path, "a swarm's secret", lambda text: Invitation.parse(text).membership)
    return None if membership is None else Credentials(membership)


def find_credentials(folder: Path, invitation: Invitation, *, is_public: bool = False) -> Credentials | None:
    """Return a peer's credentials and store them in its folder; None if its swarm is open.

    If the invitation has no addresses and the folder no earlier membership, this peer starts a swarm, which
    its user owns; it is closed unless `is_public`. A swarm that it joins is closed if the invitation, or an
    earlier one in the folder, has a membership.

    Raises:
        SetupError: a file in the folder can't be read or written, is readable by other users, or has other
            content. Nothing was changed, except that a new owner's key may have been written.
        NotAdmitted: the invitation only allows watching.
    """
    if invitation.membership is not None and invitation.membership.grant.role is not Role.member:
        raise NotAdmitted(
            "This invitation is to watch, and not to train; nothing was changed.",
            hint="ask the swarm's owner for one that `trahiv invite` makes without --watch",
        )
    if is_public and not invitation.addresses:
        return None
    owner = read_owner(folder)
    credentials = visitor_credentials(folder, invitation)
    if credentials is None:
        if invitation.addresses:
            return None
        if owner is None:
            owner = Owner(key := secrets.token_bytes(KEY_BYTES))
            _keep(folder / OWNER_FILE, key.hex())
        era = PolicyBook(owner.public, folder / POLICY_FILE).policy.era
        credentials = Credentials(owner.invite(era=era))
    if owner is not None and owner.public != credentials.membership.owner:
        owner = None  # the folder's peer has joined another owner's swarm since
    keep_invitation(folder / MEMBER_FILE, Invitation(membership=credentials.membership))
    return replace(credentials, owner=owner, folder=folder)


def read_owner(folder: Path) -> Owner | None:
    """Read the owner's key; None if the swarm was not started here. Raises as `find_credentials`."""
    return _read_secret(folder / OWNER_FILE, "an owner's key", lambda text: Owner(bytes.fromhex(text)))


def _read_secret(path: Path, what: str, parse: Callable[[str], Secret | None]) -> Secret | None:
    try:
        require_private(path)
        with path.open("rb") as file:
            if (secret := parse(file.read(MAX_CHARS + 1).decode("ascii").strip())) is None:
                raise ValueError("an invitation to an open swarm")
            return secret
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    except (ValueError, Unreachable) as error:
        raise SetupError(
            f"{path} does not hold {what}.",
            hint="move it away, and join by an invitation; who started the swarm starts another one then",
        ) from error


def _unusable(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"The file of a secret, {path}, can't be used: {error.strerror or error}.",
        hint="choose another place with --output-dir DIR",
    )


def _keep(path: Path, text: str) -> None:
    try:
        write_private(path, text.encode() + b"\n")
    except OSError as error:
        raise _unusable(path, error) from error


def write_invitation(
    folder: Path, membership: Membership, entrances: Sequence[str], run_id: str, fingerprint: str
) -> Path | None:
    """Write a member's invitation for others into a private file, and return the file's path.

    `entrances` are multiaddrs by which others can join. Returns None if the member joined with a single-use
    invitation. Raises SetupError as `keep_invitation` does.
    """
    path = (folder / INVITATION_FILE).resolve()
    if membership.grant.is_once:
        return None
    reachable = [one for one in entrances if reach_of(one) != "this machine"] or entrances
    keep_invitation(path, Invitation(tuple(reachable), membership, run_id, fingerprint))
    return path


def keep_invitation(path: Path, invitation: Invitation) -> None:
    """Write an invitation into a private file; raise SetupError if that fails, with the old file kept."""
    _keep(path, invitation.to_text())
