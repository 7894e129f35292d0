"""What the owner of a closed swarm has decided: who is out, which invitations are closed, and who stays.

1. A `Policy` is signed by the owner and numbered; the one with the highest number counts.
2. Peers hand it on by the DHT, and with each refusal of a call that it is the reason of: it takes effect
   within seconds, whether or not the owner's peer runs.
3. Each peer keeps it in its run's folder, where its processes and the owner's commands look (`PolicyBook`).

A certificate does not say when it was made. So of the peers that came by an invitation that expires, those
stay that the owner's peer saw before; at any time all peers agree on who is a member.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hivemind.utils import MSGPackSerializer

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.clock import swarm_time
from trahiv_cli.swarm.identity import write_private
from trahiv_cli.swarm.membership import SIGNATURE_BYTES, Grant, Owner, is_signed
from trahiv_cli.swarm.snapshot import unpacked

POLICY_FILE = "policy"  # in a run's folder
LOOK_EVERY_S = 0.5  # how often a process looks whether that file has changed

MARK_BYTES = 8  # to make a key whose id has the mark of another one takes some 2^64 RSA keys
MAX_POLICY_BYTES = 3200  # a policy is one record in the DHT (`node.MAX_RECORD_BYTES`)
MAX_MARKS = 380  # in one policy
# Peers by one invitation that stay when it expires: names that a member makes up must leave room for those
# who come by other invitations.
MAX_STAYING = MAX_MARKS // 2

TAKEN_OUT = "the owner has taken it out"
USED = "its invitation was used before"
CLOSED = "its invitation was closed"
OVER = "its invitation is over"
_DECIDED = b"trahiv: the owner decides "


def mark_of(*parts: bytes) -> bytes:
    """Shorten a peer's id, an invitation's key, or both, to `MARK_BYTES`."""
    return hashlib.sha256(b"".join(parts)).digest()[:MARK_BYTES]


@dataclass(frozen=True)
class Policy:
    """The owner's decisions; all sets are of marks."""

    serial: int = 0
    out: frozenset[bytes] = frozenset()  # peers that were taken out
    closed: frozenset[bytes] = frozenset()  # invitations by which nobody is let in any more
    stay: frozenset[bytes] = frozenset()  # peers by invitation: members although that is closed, used or over
    era: int = 0  # all invitations of an earlier one are closed, whether or not anybody knows them

    @property
    def room(self) -> int:
        """How many more marks it can have."""
        return MAX_MARKS - len(self.out) - len(self.closed) - len(self.stay)

    def with_those_of(self, other: Policy) -> Policy:
        """Add what another one decided and this one lacks: it is of another copy of the owner's folder.

        Peers that were removed stay out, closed invitations stay closed; others stay as far as there is room.
        """
        closed = other.closed if other.era >= self.era else frozenset()
        if other.era <= self.era and other.out <= self.out and closed <= self.closed:
            return self
        closed |= self.closed if self.era >= other.era else frozenset()
        joint = Policy(self.serial, self.out | other.out, closed, frozenset(), max(self.era, other.era))
        stay = [*sorted(self.stay), *sorted(other.stay - self.stay)]
        return replace(joint, stay=frozenset(stay[: max(0, joint.room)]))

    def objection(self, peer_id: bytes, grant: Grant) -> str:
        """Say why a peer (its id as bytes) with a good certificate is no member now, if so."""
        if self.is_out(peer_id):
            return TAKEN_OUT
        if self.keeps(peer_id, grant):
            return ""
        if grant.era < self.era or mark_of(grant.key) in self.closed:
            return USED if grant.is_once else CLOSED
        return OVER if 0 < grant.expires <= swarm_time() else ""

    def is_out(self, peer_id: bytes) -> bool:
        """Whether a peer was taken out."""
        return mark_of(peer_id) in self.out

    def keeps(self, peer_id: bytes, grant: Grant) -> bool:
        """Whether a peer is a member although its invitation is closed, used or over."""
        return mark_of(peer_id, grant.key) in self.stay

    def to_bytes(self, owner: Owner) -> bytes:
        """Pack and sign it; SetupError if it has become too long."""
        marks = (b"".join(sorted(one)) for one in (self.out, self.closed, self.stay))
        content: bytes = MSGPackSerializer.dumps([self.serial, self.era, *marks])
        if SIGNATURE_BYTES + len(content) > MAX_POLICY_BYTES:
            raise SetupError(
                f"The swarm's policy would be longer than {MAX_POLICY_BYTES} bytes; nothing was changed.",
                hint="start the swarm anew in another folder: --output-dir DIR",
            )
        return owner.sign(_DECIDED + content) + content

    @classmethod
    def parse(cls, wire: object, owner: bytes) -> Self:
        """Read what `to_bytes` gave; ValueError if it is not that, or another owner's."""
        if not isinstance(wire, bytes) or len(wire) > MAX_POLICY_BYTES:
            raise ValueError("not a policy")
        content = wire[SIGNATURE_BYTES:]
        if not is_signed(owner, wire[:SIGNATURE_BYTES], _DECIDED + content):
            raise ValueError("not signed by the owner")
        match unpacked(content):
            case [int(serial), int(era), bytes(out), bytes(closed), bytes(stay)]:
                return cls(serial, _split(out), _split(closed), _split(stay), era)
        raise ValueError("a policy of another version")


def _split(marks: bytes) -> frozenset[bytes]:
    return frozenset(marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES))


class PolicyBook:
    """The newest policy that this peer knows of.

    All processes of the peer share its file; without one it is only in memory. `clock` is monotonic seconds.
    """

    def __init__(
        self, owner: bytes, path: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner, self._path, self._clock = owner, path, clock
        self._looked_at = -LOOK_EVERY_S
        self._policy, self._wire = Policy(), b""
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
        """Take a policy over if it is the owner's and newer. Here it counts even after OSError."""
        self._look()
        if self._take(wire) and self._path is not None:
            with _locked(self._path.parent):
                self._look(at_once=True)  # another process may have a newer one by now
                if self._wire == wire:
                    write_private(self._path, self._wire)

    def decide(self, owner: Owner, change: Callable[[Policy], Policy]) -> None:
        """Change, number and sign the policy in the owner's folder.

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

    def _take(self, wire: object) -> bool:
        with contextlib.suppress(ValueError):
            policy = Policy.parse(wire, self._owner)
            older, newer = sorted((policy, self._seen), key=lambda one: one.serial)
            self._seen = newer.with_those_of(older)
            if policy.serial > self._policy.serial:
                assert isinstance(wire, bytes)
                self._policy, self._wire = policy, wire
                return True
        return False

    def _look(self, *, at_once: bool = False) -> None:
        """Read what other processes of this peer have written since the last look."""
        now = self._clock()
        if self._path is None or (now < self._looked_at + LOOK_EVERY_S and not at_once):
            return
        self._looked_at = now
        with contextlib.suppress(OSError):
            if (wire := self._path.read_bytes()) != self._wire:
                self._take(wire)


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
