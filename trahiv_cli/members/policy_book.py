"""The owner's policy as this peer knows it, and a peer's credentials."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trahiv_cli.files import write_private
from trahiv_cli.members.membership import Membership, Owner, Policy

POLICY_FILE = "policy"  # in a run's folder


@dataclass(frozen=True)
class Credentials:
    """A peer's membership in a closed swarm, from its folder or an invitation."""

    membership: Membership
    owner: Owner | None = None  # if this peer's user started the swarm
    folder: Path | None = None  # the run's, which has the policy; None: a visitor, which stores nothing

    @cached_property
    def book(self) -> PolicyBook:
        """The owner's policy."""
        return PolicyBook(self.membership.owner, self.folder and self.folder / POLICY_FILE)


class PolicyBook:
    """The newest policy that this peer knows.

    All processes of the peer share its file, and read it again every `look_every_s` seconds; without a file,
    the policy is only in memory.
    """

    def __init__(self, owner: bytes, path: Path | None = None, look_every_s: float = 0.5) -> None:
        self._owner = owner
        self._path = path
        self._look_every_s = look_every_s
        self._looked_at = -look_every_s
        self._policy = Policy()
        self._wire = b""
        self._kept = b""  # the file's content when it was last read
        self._seen = Policy()  # the policy, with the decisions of all that it has replaced

    @property
    def policy(self) -> Policy:
        """The newest known policy; an empty one if there is none."""
        self._look()
        return self._policy

    @property
    def wire(self) -> bytes:
        """The same policy, packed and signed by the owner; empty if there is none."""
        self._look()
        return self._wire

    def offer(self, wire: object) -> None:
        """Take a policy over if the owner signed it and it is newer.

        If writing it fails with OSError, it counts in this process all the same, and the next offer writes
        it.
        """
        self._look()
        self._take(wire)
        if self._path is not None and wire == self._wire != self._kept:
            with _locked(self._path.parent):
                self._look(at_once=True)  # another process may have written it, or a newer one, by now
                if wire == self._wire != self._kept:
                    write_private(self._path, self._wire)

    def decide(self, owner: Owner, change: Callable[[Policy], Policy]) -> bytes:
        """Change, number and sign the policy in the owner's folder; return it packed.

        It first adds decisions from other copies of the folder that this book was offered. Raises SetupError
        if the policy becomes too long, OSError if the file can't be written; nothing was changed then.
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
        """Reread the file if due, or `at_once`: another process of this peer may have changed it."""
        now = time.monotonic()
        if self._path is None or (now < self._looked_at + self._look_every_s and not at_once):
            return
        self._looked_at = now
        with contextlib.suppress(OSError):
            if (kept := self._path.read_bytes()) != self._kept:
                self._kept = kept
                self._take(kept)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against changes by other processes that use this lock."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
