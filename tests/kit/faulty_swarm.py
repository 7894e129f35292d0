"""Small swarms of real processes whose peers (`tests.kit.faulty_peer`) go wrong as told."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tests.kit import faulty_peer
from tests.kit.faults import Fault
from tests.kit.faulty_peer import GO, Event, Settings, run_peer
from tests.kit.promises import find_broken_promises, find_lost_steps
from trahiv_cli.swarm.identity import ensure_identity

START_S = 60.0
STEP_S = 60.0
"""Deadline for a few steps without a fault, on a busy machine."""


class Swarm:
    """Peers by number, on one machine. Use as a context manager: at the end no process is left.

    Args:
        folder: for identities and logs.
        settings: of each peer.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings = folder, settings or Settings()
        self.ids = [ensure_identity(folder / f"{n}.key") for n in range(self.settings.num_peers)]
        """Peer ids, base58, by number."""

        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([faulty_peer.__name__])
        self._processes: dict[int, Any] = {}
        self._born: dict[int, int] = {}  # how many events a peer's earlier lives have left
        self._told: dict[int, list[Event]] = {}
        self._offsets: dict[int, int] = {}

    # -- peers -------------------------------------------------------------------------------------

    def start(self, number: int, *faults: Fault, as_new: bool = False, **changes: Any) -> None:
        """Start a peer that joins those that run.

        Args:
            number: of the peer; its stream follows from it.
            *faults: what goes wrong in it.
            as_new: give it a new identity.
            **changes: of its settings.
        """
        if as_new:
            (self.folder / f"{number}.key").unlink()
            self.ids[number] = ensure_identity(self.folder / f"{number}.key")
        self._born[number] = len(self.events(number))
        self._processes.pop(number, None)
        arguments = (self.folder, number, replace(self.settings, **changes), faults, self.addresses())
        self._processes[number] = self._context.Process(target=run_peer, args=arguments)
        self._processes[number].start()

    def start_all(self, faults: Mapping[int, Sequence[Fault]] | None = None) -> None:
        """Start all peers of the swarm, each with its faults, and wait until they train together."""
        for number in range(self.settings.num_peers):
            self.start(number, *(faults or {}).get(number, ()))
            if number == 0:
                self.wait_for_ready(0)
        for number in range(1, self.settings.num_peers):
            self.wait_for_ready(number)
        self.go()

    def go(self) -> None:
        """Let those that are ready, and all that come, train."""
        (self.folder / GO).touch()

    def wait_for_ready(self, number: int) -> Event:
        """Wait until a peer that was started takes part."""
        told = lambda: self._readiness(number)  # noqa: E731
        self.wait(lambda: bool(told()) or not self.is_running(number), START_S, f"peer {number} is ready")
        assert told(), f"peer {number} ended\n{self._story()}"
        return told()[-1]

    def addresses(self) -> tuple[str, ...]:
        """Where those can be reached that take part."""
        told = [self._readiness(number) for number in self._processes if self.is_running(number)]
        return tuple(ready[-1]["maddr"] for ready in told if ready)

    def is_running(self, number: int) -> bool:
        return number in self._processes and self._processes[number].is_alive()

    def stop_running(self, number: int) -> None:
        """End a peer and all its processes at once, as a power cut would."""
        process = self._processes[number]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not have come to have a group of its own
        process.join()

    def wait_for_end(self, number: int, timeout_s: float) -> None:
        """Wait until a peer has died of its fault."""
        self.wait(lambda: not self.is_running(number), timeout_s, f"peer {number} dies")

    def close(self) -> None:
        """End every process that was started here, by its id."""
        for number in self._processes:
            self.stop_running(number)
            for sockets in Path("/tmp").glob(f"trahiv-{self._processes[number].pid}-*"):
                shutil.rmtree(sockets, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what they said ----------------------------------------------------------------------------

    def events(self, number: int, event: str = "") -> list[Event]:
        """What a peer said in all of its lives, or only events of one name."""
        events, path = self._told.setdefault(number, []), self.folder / f"{number}.jsonl"
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._offsets.get(number, 0))
                whole = log.read().rpartition(b"\n")[0]
            self._offsets[number] = self._offsets.get(number, 0) + len(whole) + bool(whole)
            events += map(json.loads, whole.splitlines())
        return [said for said in events if event in ("", said["event"])]

    def places(self, number: int) -> list[Event]:
        """What a peer said of where it is: of the weights and the history that it holds."""
        return [said for said in self.events(number) if "digest" in said]

    def reached(self, number: int) -> int:
        """The swarm step that a peer holds."""
        places = self.places(number)
        return places[-1]["step"] if places else -1

    def log(self, number: int) -> str:
        """What a peer has logged."""
        return (self.folder / f"{number}.txt").read_text(errors="replace")

    def everything(self) -> dict[str, list[Event]]:
        """All events of all peers, by name."""
        return {str(number): self.events(number) for number in self._processes}

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait until a condition holds; say after how many seconds.

        Raises:
            AssertionError: it does not hold in time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"not in {timeout_s} s: {what}\n{self._story()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for_step(self, step: int, numbers: Iterable[int], timeout_s: float) -> float:
        """Wait until these peers have reached a step."""
        reached = lambda: all(self.reached(number) >= step for number in numbers)  # noqa: E731
        return self.wait(reached, timeout_s, f"peers {numbers} reach step {step}")

    def wait_for_step_after(self, moment: float, number: int, timeout_s: float) -> Event:
        """Wait for the first step that a peer takes itself after a moment of the monotonic clock."""
        later = lambda: [said for said in self.events(number, "step") if said["time"] > moment]  # noqa: E731
        self.wait(lambda: bool(later()), timeout_s, f"peer {number} takes a step")
        return later()[0]

    def wait_until_equal(self, numbers: Iterable[int], timeout_s: float, beyond: int = 0) -> float:
        """Wait until these peers have taken one same step beyond `beyond`."""

        def are_equal() -> bool:
            held = [{one["digest"] for one in self.places(n) if one["step"] > beyond} for n in numbers]
            return bool(set.intersection(*held))

        return self.wait(are_equal, timeout_s, f"peers {numbers} have one history beyond {beyond}")

    def require_promises(self, numbers: Iterable[int] | None = None) -> None:
        """Require that these peers (all) kept every promise, and that no step of theirs is lost."""
        everything = self.everything()
        said = everything if numbers is None else {str(number): everything[str(number)] for number in numbers}
        broken = find_broken_promises(said)
        assert not broken, broken
        assert find_lost_steps(said) == {}

    def _readiness(self, number: int) -> list[Event]:
        return [said for said in self.events(number)[self._born[number] :] if said["event"] == "ready"]

    def _story(self) -> str:
        lines = []
        for number in sorted(self._processes):
            state = "running" if self.is_running(number) else "ended"
            lines.append(f"peer {number} ({self.ids[number][-6:]}), {state}:")
            lines += [f"  {said}" for said in self.events(number)[-12:]]
            lines.append(self.log(number)[-1500:])
        return "\n".join(lines)
