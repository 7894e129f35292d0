"""What must hold whatever happens, told from what peers (`tests.kit.faulty_peer`) say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Event = dict[str, Any]


class Promises:
    """What no fault excuses, looked at as peers say what happens to them.

    Who committed a step holds what everybody holds who did; it counted the samples that all of them
    counted, each once, and of its own those that it had.
    """

    def __init__(self) -> None:
        self.broken: list[str] = []
        """A sentence for each thing that is wrong."""
        self._own: dict[str, str] = {}
        self._places: dict[str, tuple[int, int, str]] = {}
        self._links: dict[str, tuple[str, int, dict[str, int]]] = {}
        self._excused: set[str] = set()

    def excuse(self, name: str) -> None:
        """Do not hold a peer to what it trained: some of it was not finite, and was dropped."""
        self._excused.add(name)

    def hear(self, name: str, said: Event) -> None:
        """Look at one event of one peer."""
        if said["event"] == "ready":
            self._own[name] = said["peer"]  # another one than in its last life, perhaps
        if "digest" not in said:
            return
        own, digest = self._own.get(name, ""), said["digest"]
        place = said["step"], said["samples"], said["weights"]
        if self._places.setdefault(digest, place) != place:
            self.broken.append(f"{name} holds {place} at {digest[:8]}, another peer {self._places[digest]}")
        if said["event"] != "step":
            return
        link, samples = (said["parent"], said["step_samples"], said["contributed"]), said["step_samples"]
        if self._links.setdefault(digest, link) != link:
            other = self._links[digest]
            self.broken.append(f"{name} came to {digest[:8]} by {link}, another peer by {other}")
        contributed = said["contributed"] or {own: said["my_samples"]}
        if samples != sum(contributed.values()):
            self.broken.append(f"{name} counted {samples} samples of {contributed}")
        is_held_to_it = name not in self._excused and own not in said["left_out"]
        if is_held_to_it and contributed.get(own) != said["held"]:
            self.broken.append(f"{name} held {said['held']} samples at {digest[:8]} of {contributed}")
        before = self._places.get(said["parent"])
        if before is not None and before[1] + samples != said["samples"]:
            self.broken.append(f"step {digest[:8]} does not add {samples} samples to {before}")


def find_broken_promises(everything: Mapping[str, Sequence[Event]]) -> list[str]:
    """Find what `Promises` say is wrong in the events of all peers of a run."""
    promises = Promises()
    for name, events in everything.items():
        for said in events:
            promises.hear(name, said)
    return promises.broken


def find_lost_steps(everything: Mapping[str, Sequence[Event]]) -> dict[str, list[str]]:
    """Find steps that some peer took and that are not behind the greatest history.

    Returns:
        By digest the names of the peers that had taken it.
    """
    taken = [
        (name, said) for name, events in everything.items() for said in events if said["event"] == "step"
    ]
    parents = {said["digest"]: said["parent"] for _, said in taken}
    digest = max(((said["samples"], said["digest"]) for _, said in taken), default=(0, ""))[1]
    kept = set()
    while digest in parents:
        kept.add(digest)
        digest = parents[digest]
    lost: dict[str, list[str]] = defaultdict(list)
    for name, said in taken:
        if said["digest"] not in kept:
            lost[said["digest"]].append(name)
    return lost
