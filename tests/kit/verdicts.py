"""What is wrong with a run: of toy peers (`tests.kit.faulty_peer`), and of the real command.

It is told from what peers say, of the command from checkpoints too.
"""

import json
import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

from trahiv_cli.progress.ledger import Ledger

Event = dict[str, Any]

SAME_LOSS = 1e-4
"""Peers whose weights are equal differ by so much at most, relative: by the order of their sums."""


class Promises:
    """What no fault excuses, looked at as peers say what happens to them.

    Who committed a step holds what everybody holds who did; it counted the samples that all of them
    counted, each once, and of its own those that it had.
    """

    def __init__(self):
        self.broken = []
        """A sentence for each thing that is wrong."""
        self._own = {}
        self._places = {}
        self._links = {}
        self._excused = set()

    def excuse(self, name):
        """Do not hold a peer to what it trained: some of it was not finite, and was dropped."""
        self._excused.add(name)

    def hear(self, name, said):
        """Look at one event of one peer."""
        if said["event"] == "ready":
            self._own[name] = said["peer"]  # another one than in its last life, perhaps
        if "digest" not in said:
            return
        own = self._own.get(name, "")
        digest = said["digest"]
        place = said["step"], said["samples"], said["weights"]
        if self._places.setdefault(digest, place) != place:
            self.broken.append(f"{name} holds {place} at {digest[:8]}, another peer {self._places[digest]}")
        if said["event"] != "step":
            return
        link = (said["parent"], said["step_samples"], said["contributed"])
        samples = said["step_samples"]
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


def find_broken_promises(everything):
    """Find what `Promises` say is wrong in the events of all peers of a run."""
    promises = Promises()
    for name, events in everything.items():
        for said in events:
            promises.hear(name, said)
    return promises.broken


def find_lost_steps(everything):
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
    lost = defaultdict(list)
    for name, said in taken:
        if said["digest"] not in kept:
            lost[said["digest"]].append(name)
    return lost


def group_of(step):
    """The peers that took a step together; none where there was no round."""
    return (step["round"] or {}).get("group") or []


def find_falls(peers):
    """Say which peer took a step, or took over a state, that it had been beyond before."""
    falls = []
    for number, events in enumerate(peers):
        reached = -1
        for one in events:
            if one["event"] == "step":
                if one["step"] <= reached:
                    falls.append(f"peer {number} takes step {one['step']} after step {reached}")
                reached = max(reached, one["step"])
            elif one["event"] == "joined" and one["source"] == "fresh" and reached > 0:
                falls.append(f"peer {number} begins with a fresh model after step {reached}")
    return falls


def back_after(events, moment):
    """Say how long after a moment a peer took its next step together with another one; None if it did not."""
    steps = (one for one in events if one["event"] == "step" and one["t"] > moment)
    return next((one["t"] - moment for one in steps if len(group_of(one)) > 1), None)


def losses_of(peers):
    """Collect the loss on held-out data after each step at which a peer evaluated.

    Returns:
        The first one told for each step, ascending, and sentences on peers that found another one.
    """
    found = defaultdict(list)
    for number, events in enumerate(peers):
        for one in events:
            if one["event"] == "eval":
                found[one["step"]].append((number, one["eval_loss"]))
    wrong = [
        f"after step {step} peer {number} has a loss of {loss:.6f}, peer {at[0][0]} of {at[0][1]:.6f}"
        for step, at in sorted(found.items())
        for number, loss in at[1:]
        if abs(loss - at[0][1]) > SAME_LOSS * at[0][1]
    ]
    return {step: at[0][1] for step, at in sorted(found.items())}, wrong


def worst_jump(losses):
    """The greatest ratio of a loss to the one before."""
    return max((after / before for before, after in pairwise(losses.values())), default=math.nan)


def newest_checkpoint(run):
    """The folder of a run's newest checkpoint, if it has one."""
    return max(run.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]), default=None)


def furthest_of(runs):
    """Read what the furthest of the peers' newest checkpoints says was trained.

    Returns:
        Its ledger, and sentences on others' checkpoints of that step that say something else.
    """
    found = []
    for number, run in enumerate(runs):
        newest = newest_checkpoint(run)
        assert newest is not None, f"peer {number} has no checkpoint"
        state = json.loads((newest / "state.json").read_text())
        found.append((int(newest.name[5:]), number, Ledger.from_wire(state["ledger"])))
    step, first, ledger = max(found, key=lambda one: one[0])
    wrong = [
        f"peers {number} and {first} do not agree on what was trained at step {step}"
        for own_step, number, own in found
        if own_step == step and own != ledger
    ]
    return ledger, wrong


def judge_data(ledger, num_samples, leases_lost):
    """Say what is wrong with what the steps have trained."""
    wrong = []
    passes = ledger.passes(num_samples)[0]
    begun = ledger.covered.spans[-1][1] // num_samples if ledger.covered else 0
    if passes < max(1, begun - 1):
        wrong.append(f"{passes} passes are complete, and the {begun + 1}th has begun")
    if ledger.duplicates > leases_lost:
        wrong.append(f"{ledger.duplicates} samples were trained twice, {leases_lost} leases were lost")
    return wrong


def total_lost(events):
    """Leases that a peer lost in all of its lives: it counts anew in each."""
    total = before = 0
    for one in events:
        if one["event"] == "step" and one.get("data"):
            total += max(0, one["data"]["lost"] - before)
            before = one["data"]["lost"]
        elif one["event"] == "joined":
            before = 0
    return total
