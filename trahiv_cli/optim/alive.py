"""Whether a peer can go on: its processes run, it is a member, and nobody wants it to leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trahiv_cli.errors import PeerBroken
from trahiv_cli.swarm.vitals import Organ, Vitals
from trahiv_cli.telemetry.events import Events


class Home(Organ, Protocol):
    """What is needed of a `Node`."""

    def require_membership(self) -> None:
        """See `Node.require_membership`."""

    def is_out(self, peer_id: str) -> bool:
        """See `Node.is_out`."""


class Alive:
    """Watches this peer's processes, its membership and its user's wish to leave.

    Args:
        home: where the DHT lives; without one nothing is watched.
        events: told about a process that failed.
        should_leave: whether this peer is to leave.
    """

    def __init__(self, home: Home | None, events: Events, should_leave: Callable[[], bool]) -> None:
        self._home, self._events, self.should_leave = home, events, should_leave
        self._vitals = Vitals(())
        self._is_closed = False

    def watch(self, *organs: Organ) -> None:
        """Watch these besides the home."""
        if self._home is not None:
            self._vitals = Vitals((self._home, *organs), self._warn)
            self._vitals.start()

    def _warn(self, ailment: str) -> None:
        self._events.warn(
            "broken",
            f"{_sentence(ailment)}; this peer saves a checkpoint and ends.",
            "nothing to do where a command trains: it starts again by itself, three times in ten minutes",
        )

    @property
    def ailment(self) -> str:
        """What is wrong with the process that failed; empty if none did."""
        return self._vitals.ailment

    @property
    def must_stop(self) -> bool:
        """Whether nothing more is to be waited for."""
        return self.should_leave() or self._is_closed or bool(self.ailment)

    def is_out(self, peer_id: str) -> bool:
        """Whether the swarm's owner has taken a peer out."""
        return self._home is not None and self._home.is_out(peer_id)

    def require(self) -> None:
        """Refuse to train on without one of this peer's processes, or as nobody's member.

        Raises:
            PeerBroken: a process has ended or stands still.
            NotAdmitted: the swarm's owner has taken this peer out.
        """
        if self._home is not None:
            self._home.require_membership()
        if self.ailment and not self.should_leave():
            raise PeerBroken(
                f"{_sentence(self.ailment)}.",
                hint="the same command resumes from the checkpoint; trahiv.log in the run's folder says more",
            )

    def close(self) -> bool:
        """Watch no more. Return whether this is the first call."""
        is_first, self._is_closed = not self._is_closed, True
        self._vitals.close()
        return is_first


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
