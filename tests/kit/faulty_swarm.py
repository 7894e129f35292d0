"""Small swarms of real processes whose peers (`tests.kit.faulty_peer`) go wrong as told."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kit.commands import Peer, Workplace
from tests.kit.faults import Fault
from tests.kit.faulty_peer import GO, Event, Settings
from tests.kit.promises import find_broken_promises, find_lost_steps

START_S = 60.0
STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""


class Swarm(Workplace):
    """Peers by number, on one machine. Use as a context manager: at the end no process is left.

    Args:
        folder: for identities and logs.
        settings: of each peer.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        super().__init__(folder)
        self.settings = settings or Settings()
        self._lives: dict[int, list[Peer]] = defaultdict(list)

    def join(self, number: int, *faults: Fault, as_new: bool = False, **changes: Any) -> Peer:
        """Start a peer that joins those that run, and wait until it takes part.

        Args:
            number: of the peer; its stream of data follows from it.
            *faults: what goes wrong in it.
            as_new: give it a new identity.
            **changes: of its settings.
        """
        if as_new:
            (self.folder / f"{number}.key").unlink()
        plan = pickle.dumps((replace(self.settings, **changes), faults)).hex()
        script = "from tests.kit.faulty_peer import main; main()"
        peer = self.start_script(script, number, plan, *self.addresses())
        self._lives[number].append(peer)
        peer.wait_for("ready", START_S)
        return peer

    def go(self) -> None:
        """Let those that are ready, and all that come, train."""
        (self.folder / GO).touch()

    def addresses(self) -> list[str]:
        """Where those can be reached that take part."""
        newest = [lives[-1] for lives in self._lives.values()]
        return [peer.wait_for("ready", 1)["maddr"] for peer in newest if peer.is_running]

    def events(self, number: int, event: str = "") -> list[Event]:
        """What a peer said in all of its lives, or only events of one name."""
        said = (one for life in self._lives[number] for one in tuple(life.events))
        return [one for one in said if event in ("", one["event"])]

    def places(self, number: int) -> list[Event]:
        """What a peer said of where it is: of the weights and the history that it holds."""
        return [said for said in self.events(number) if "digest" in said]

    def reached(self, *numbers: int) -> int:
        """The furthest swarm step that any of these peers holds."""
        return max(self.places(number)[-1]["step"] for number in numbers)

    def wait_until_equal(self, numbers: Iterable[int], timeout_s: float, beyond: int = 0) -> None:
        """Wait until these peers have come to one same history beyond a step."""
        deadline = time.monotonic() + timeout_s
        while True:
            held = [{one["digest"] for one in self.places(n) if one["step"] > beyond} for n in numbers]
            if set.intersection(*held):
                return
            assert time.monotonic() < deadline, [self.places(number)[-5:] for number in numbers]
            time.sleep(0.05)

    def require_promises(self, *numbers: int) -> None:
        """Require that these peers (all) kept every promise, and that no step of theirs is lost."""
        said = {str(number): self.events(number) for number in numbers or self._lives}
        assert find_broken_promises(said) == []
        assert find_lost_steps(said) == {}
