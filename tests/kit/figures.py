"""What paced peers tell of a run, and what that comes to: joint steps, and the window in which samples count.

A step is **joint** when all peers have committed it. Of ours that is proved by equal digests of `history`,
and all must have taken it themselves rather than downloaded it. Plain hivemind's is one whose gradients
all averaged in one group at the same epoch, starting from about the same weights: half of 1024 of them
differ by less than one learning rate, or they train different models.

**The window** opens when the first joint step is committed, by the last of the peers, and closes with the
first that is committed `seconds` after that. So it has whole cycles, each in full: to close at the last
step before the time is up would favour short ones.

**Only samples computed in the window count.** When it opens, peers hold samples that a later step will
commit: to count all of that step's would credit the window with what was computed before it (5 to 9 % too
much at 5 Mbit/s). With each step a peer says how many it holds; those that it computes until the other has
committed the step it holds as well. Counted are the samples of all joint steps after the first one, less
what was held at the first one's commit, plus what was held at the closing one's. Where nothing is lost, that
is the number of samples computed in the window, so a utilisation is at most 1, however short the window. A
peer that loses samples gains nothing: they are in no joint step, and held no more.
"""

import bisect
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from trahiv_cli.progress.pace import Pace

LEARNING_RATE = 1e-3

Sample = tuple[float, ...]  # some of a peer's weights


@dataclass(frozen=True)
class Committed:
    """A step, as one peer tells it."""

    at: float
    """On the clock that all processes of a machine share."""

    key: str
    """Equal in peers that took the step together: the history's digest, or hivemind's epoch."""

    samples: int
    is_share: bool
    """`samples` are this peer's alone; otherwise all that went into the step."""

    held: int
    """Samples that this peer has computed by then, and that are in no committed step yet."""

    weights: Sample = ()
    """With hivemind some of the peer's before the step; with trahiv the digest says that they are equal."""


@dataclass(frozen=True)
class Adapted:
    """Mode auto has said by what pace it goes on, and why."""

    at: float
    why: str
    before: Pace
    after: Pace


News = tuple[str, Any]
"""What a peer tells: the name of an attribute of `Told` and what is noted there, or `ended` and why."""


class PeerEnded(Exception):
    """A peer has ended in the middle of a run."""


@dataclass
class Told:
    """What one peer has told."""

    address: str | None = None
    """None until it is ready."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    """When a call of `step()`, one for each sample, ended, and how long it took."""

    committed: dict[str, Committed] = field(default_factory=dict)
    adapted: list[Adapted] = field(default_factory=list)
    downloading: list[tuple[float, int, int]] = field(default_factory=list)
    """When how many bytes of the others' state were there, and of how many."""

    adopted: list[float] = field(default_factory=list)
    """When it had taken over the others' state."""

    failures: list[str] = field(default_factory=list)
    """Why rounds failed."""

    answers: list[Any] = field(default_factory=list)
    """What it says when it is asked for more."""

    def hear(self, news):
        """Take note of one piece of news.

        Raises:
            PeerEnded: it is that the peer has ended.
        """
        match news:
            case "ended", why:
                raise PeerEnded(why)
            case "address", address:
                self.address = address
            case "committed", step:
                self.committed[step.key] = step
            case what, value:
                getattr(self, what).append(value)

    def computed(self, after, until):
        """Count the samples of calls that began after one moment and ended before another."""
        places = (bisect.bisect_right(self.calls, (at, math.inf)) for at in (after, until))
        return sum(at - took >= after for at, took in self.calls[slice(*places)])


@dataclass(frozen=True)
class Joint:
    """A step that all peers have committed."""

    at: float
    """When the last of them did."""

    samples: int
    held: int
    """Samples computed by then that are in no committed step yet, of all peers."""


@dataclass(frozen=True)
class Window:
    """What is measured; the top of this file says why it has no bias."""

    start: float
    end: float
    samples: int
    """Those that count."""

    steps: int


def find_joint(told):
    """Find the steps that all peers have committed together, in their order."""
    joint = []
    for key in set.intersection(*(set(one.committed) for one in told)):
        views = [one.committed[key] for one in told]
        apart = [max(values) - min(values) for values in zip(*(v.weights for v in views), strict=True)]
        if apart and statistics.median(apart) > LEARNING_RATE:
            continue
        samples = sum(v.samples for v in views) if views[0].is_share else views[0].samples
        at = max(v.at for v in views)
        held = sum(v.held + one.computed(v.at, at) for v, one in zip(views, told, strict=True))
        joint.append(Joint(at, samples, held))
    return sorted(joint, key=lambda one: one.at)


def find_window(joint, seconds, began, now):
    """Find the window as it is so far.

    Args:
        joint: the steps, in their order.
        seconds: how long it shall be at least.
        began: when all peers began to train: there it opens until there is a joint step.
        now: its end, as long as no step has closed it.

    Returns:
        The window, and whether a step has closed it.
    """
    if not joint:
        return Window(began, now, 0, 0), False
    first, *others = joint
    last = next((n for n, one in enumerate(others) if one.at >= first.at + seconds), None)
    counted = others if last is None else others[: last + 1]
    end, held = (now, 0) if last is None else (others[last].at, others[last].held)
    samples = sum(one.samples for one in counted) + held - first.held
    return Window(first.at, end, max(0, samples), len(counted)), last is not None


def utilisation(window, paces_s):
    """Return the window's samples over those that peers of these paces compute in it without an optimizer."""
    return window.samples / sum((window.end - window.start) / pace_s for pace_s in paces_s)
