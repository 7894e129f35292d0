"""What paced peers tell of a run, and what that comes to: joint steps, a window, how a peer joined.

A step is **joint** when all peers have committed it. Of ours that is proved by equal digests of `history`,
and all must have taken it themselves rather than downloaded it. Plain hivemind's is one whose gradients
all averaged in one group at the same epoch, starting from about the same weights: half of 1024 of them
differ by less than one learning rate, or they train different models.

**The window** opens when the first joint step is committed, by the last of the peers, and closes with the
first that is committed `seconds` after that. So it has whole cycles, each in full: to close at the last
step before the time is up would favour short ones.

**Only samples computed in the window count.** Peers compute during a round, too, and before the first one
while the swarm forms. So when the window opens they hold samples that a later step will commit, and to
count all of that step's would credit the window with what was computed before it (5 to 9 % too much at 5
Mbit/s). With each step a peer says how many samples it holds; those that it computes until the other has
committed the step it holds as well. Counted are the samples of all joint steps after the first one, less
what was held at the first one's commit, plus what was held at the closing one's. Where nothing is lost,
that is the number of samples computed in the window, so a utilisation is at most 1, however short the
window. A peer that loses samples gains nothing: they are in no joint step, and held no more. What is held
at the close and lost after it has its like, taken off though it was lost, in what was held at the opening;
and what can be held is bounded, so the difference of the two goes to nothing with the length of the
window.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.pace import Pace

LEARNING_RATE = 1e-3

Sample = tuple[float, ...]
"""Some of a peer's weights."""


# -- what peers tell ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A peer can begin to train."""

    address: str


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

    weights: Sample
    """Some of the peer's, with trahiv after the step, with hivemind before it."""

    held: int
    """Samples that this peer has computed by then, and that are in no committed step yet."""


@dataclass(frozen=True)
class Adapted:
    """Mode auto has said by what pace it goes on, and why."""

    at: float
    step: int
    why: str
    before: Pace
    after: Pace

    @property
    def is_lighter(self) -> bool:
        """Whether fewer bytes than before are sent for a step."""
        before, after = (
            CODECS[pace.codec or "none"]().encoded_bytes(2**20, torch.float32)
            / (pace.local_steps if pace.has_local_steps else 1)
            for pace in (self.before, self.after)
        )
        return after < before


@dataclass(frozen=True)
class Downloading:
    """How far a download of the others' state is."""

    at: float
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Adopted:
    """A peer has taken over the others' state."""

    at: float


@dataclass(frozen=True)
class Ended:
    """A peer was ended by an error."""

    why: str


Call = tuple[float, float]
"""When a call of `step()`, one for each sample, ended, and how long it took."""

News = Ready | Call | Committed | Adapted | Downloading | Adopted | Ended | str
"""What a peer tells; a text is why a round failed."""


class PeerEnded(Exception):
    """A peer has ended in the middle of a run."""


@dataclass
class Told:
    """What one peer has told."""

    address: str | None = None
    """None until it is ready."""

    calls: list[Call] = field(default_factory=list)
    committed: dict[str, Committed] = field(default_factory=dict)
    adapted: list[Adapted] = field(default_factory=list)
    downloading: list[Downloading] = field(default_factory=list)
    adopted: list[Adopted] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why rounds failed."""

    def hear(self, one: News) -> None:
        """Take note of one piece of news.

        Raises:
            PeerEnded: it is that the peer has ended.
        """
        match one:
            case Ended(why):
                raise PeerEnded(why)
            case Ready(address):
                self.address = address
            case Committed(key=key):
                self.committed[key] = one
            case Adapted():
                self.adapted.append(one)
            case Downloading():
                self.downloading.append(one)
            case Adopted():
                self.adopted.append(one)
            case str(reason):
                self.failures.append(reason)
            case (float(at), float(took)):
                self.calls.append((at, took))

    def computed(self, after: float, until: float) -> int:
        """Count the samples of calls that began after one moment and ended before another."""
        places = (bisect.bisect_right(self.calls, (at, math.inf)) for at in (after, until))
        return sum(at - took >= after for at, took in self.calls[slice(*places)])


# -- joint steps, and the window -----------------------------------------------------------------


@dataclass(frozen=True)
class Joint:
    """A step that all peers have committed."""

    at: float
    """When the last of them did."""

    samples: int
    held: int
    """Samples computed by then that are in no committed step yet, of all peers."""

    difference: float
    """Of the peers' weights, the largest."""


@dataclass(frozen=True)
class Window:
    """What is measured; the top of this file says why it has no bias."""

    start: float
    end: float
    samples: int
    """Those that count."""

    steps: int


def find_joint(told: Sequence[Told]) -> list[Joint]:
    """Find the steps that all peers have committed together, in their order."""
    joint: list[Joint] = []
    for key in set.intersection(*(set(one.committed) for one in told)):
        views = [one.committed[key] for one in told]
        apart = [max(values) - min(values) for values in zip(*(v.weights for v in views), strict=True)]
        if views[0].is_share and statistics.median(apart) > LEARNING_RATE:
            continue
        samples = sum(v.samples for v in views) if views[0].is_share else views[0].samples
        at = max(v.at for v in views)
        held = sum(v.held + one.computed(v.at, at) for v, one in zip(views, told, strict=True))
        joint.append(Joint(at, samples, held, max(apart)))
    return sorted(joint, key=lambda one: one.at)


def find_window(joint: Sequence[Joint], seconds: float, began: float, now: float) -> tuple[Window, bool]:
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


def calls_in(window: Window, told: Told) -> list[float]:
    """Return what is in the window of each of a peer's calls of `step()`, in seconds."""
    ended = (call for call in told.calls if window.start < call[0] <= window.end)
    return [min(took, at - window.start) for at, took in ended]


def utilisation(window: Window, paces_s: Iterable[float]) -> float:
    """Return the window's samples over those that peers of these paces compute in it without an optimizer."""
    return window.samples / sum((window.end - window.start) / pace_s for pace_s in paces_s)


def blocked_s(calls: Sequence[float]) -> float:
    """Return how long calls took together, each beyond the median."""
    usual = statistics.median(calls) if calls else 0.0
    return sum(max(0.0, took - usual) for took in calls)


def adaptation(told: Iterable[Told], after: float) -> tuple[int, float] | None:
    """Find when mode auto first went over to a lighter pace after a moment.

    What it knows is one exchange old: just after a link fell it may go over to a heavier one first.

    Returns:
        How many steps the peer that said it first committed from the moment on, the one with which it said it
        included, and how many seconds passed; None if no peer did.
    """
    said = [(news.at, one) for one in told for news in one.adapted if news.at > after and news.is_lighter]
    if not said:
        return None
    at, one = min(said, key=lambda pair: pair[0])
    return sum(after < step.at <= at for step in one.committed.values()), at - after


def reasons_of(told: Iterable[Told]) -> list[str]:
    """Say why rounds failed, as all peers tell it: one may be told of by several."""
    fell_behind = "it fell behind, and took over the others' state"
    return [why for one in told for why in (*one.failures, *(fell_behind for _ in one.adopted))]


def median_of(values: Iterable[float | None]) -> float:
    """Return the median of those that are known; NaN if none is."""
    known = [value for value in values if value is not None and value == value]
    return statistics.median(known) if known else float("nan")


# -- how a peer joined ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Joining:
    """How one peer joined; times in seconds since its process was started, None for what did not happen."""

    side: str
    link: str
    first_byte_s: float | None
    last_byte_s: float | None
    sample_s: float | None
    joint_s: float | None
    downloads: int
    state_bytes: int | None
    """Of what was to be downloaded first."""

    received_bytes: int
    donor_stall_s: float
    reasons: list[str]
    """Why rounds and downloads failed, as both peers tell it."""

    def __str__(self) -> str:
        """Say the most important, for a person who waits."""
        sample, joint = say_median([self.sample_s]), say_median([self.joint_s])
        return f"seconds to the first sample: {sample}, joint step: {joint}; downloads: {self.downloads}"


def joining_of(
    name: str,
    link: str,
    told: Sequence[Told],
    started: float,
    limit: float,
    received: Sequence[tuple[float, int]],
) -> Joining:
    """Tell from the news how a peer joined.

    Args:
        name: of the side.
        link: its name.
        told: what donor and joiner have told.
        started: when the joiner's process was.
        limit: when the run was over.
        received: the bytes that the joiner's link had brought by several times, in their order.
    """
    donor, joiner = told
    joint = next((one.at for one in find_joint(told)), None)
    adopted = [one.at for one in joiner.adopted if one.at <= (joint or limit)]
    begun = (at for at, took in joiner.calls if adopted and at - took >= adopted[-1])
    sample = next(begun, None)
    until = sample or limit
    coming = [one for one in joiner.downloading if one.num_bytes > 0]
    first = coming[0] if coming else None
    last = next((one for one in coming if one.num_bytes == one.total_bytes), None)

    def since(at: float | None) -> float | None:
        return None if at is None else at - started

    def brought(at: float) -> int:
        place = bisect.bisect_left(received, (at, 0))
        return received[min(place, len(received) - 1)][1]

    return Joining(
        side=name,
        link=link,
        first_byte_s=since(first.at) if first else None,
        last_byte_s=since(last.at) if last else None,
        sample_s=since(sample),
        joint_s=since(joint),
        downloads=len(adopted),
        state_bytes=first.total_bytes if first else None,
        received_bytes=brought(until) - brought(started),
        donor_stall_s=max(
            (took for at, took in donor.calls if started < at <= until), default=until - started
        ),
        reasons=[*donor.failures, *joiner.failures],
    )


def say_median(times: Iterable[float | None]) -> str:
    """Say the median; what never happened comes last."""
    median = statistics.median_low(math.inf if one is None else one for one in times)
    return "never" if math.isinf(median) else f"{median:.1f}"
