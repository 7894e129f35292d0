"""What the parts of one peer's optimizer share (`Parts`), and its smallest parts.

- `Company` says which peers its next group needs, and whether it may step without them.
- `Equality` says by a digest what it holds in common with others, and whose state it takes over if not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trahiv_cli.errors import NotFinite
from trahiv_cli.optim.auto import Adaptation
from trahiv_cli.optim.ballot import digest_of, joint_digest
from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.leases import Work
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace, RoundRules
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rounds import are_finite, state_to_adopt
from trahiv_cli.optim.state import ExactStateAverager, common_digest
from trahiv_cli.swarm.alive import Alive
from trahiv_cli.swarm.host_copies import host_values
from trahiv_cli.swarm.snapshot import JoinerActivity
from trahiv_cli.telemetry.events import Events

STATE_DIGEST_BYTES = 8


class Company:
    """The other peers, as far as this peer's next step depends on them, by reports that are a little old."""

    def __init__(self, tracker: SwarmTracker, rules: RoundRules) -> None:
        self._tracker = tracker
        self._rules = rules
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the search that is over: a step was taken, or a state adopted."""
        self.missed_since = float("inf")  # when this peer began to look for its group, by the monotonic clock
        self.tries = 0  # rounds for the next step that were not committed
        self.said_after_s = 0.0  # how long this peer had been looking when a person was last told

    @property
    def groupmates(self) -> list[str]:
        """Ids of the peers that hold this peer's state, or are about to.

        Members of the round that led here count however old their reports are: else a quick peer would go on
        without them.
        """
        own = self._tracker.history
        last_group = self._tracker.companions
        return [
            peer.peer_id
            for peer in self._tracker.others
            if peer.history == own or (peer.peer_id in last_group and peer.history.rank < own.rank)
        ]

    @property
    def vanished(self) -> set[str]:
        """Ids of the last group's members that are not seen any more and did not say goodbye."""
        there = {peer.peer_id for peer in self._tracker.others} | {self._tracker.own_id}
        return set(self._tracker.companions) - there - self._tracker.gone

    @property
    def may_step_alone(self) -> bool:
        """Whether this peer may step with its own gradients; peers that are behind count as company."""
        is_company_left = bool(self._tracker.others or self.vanished)
        return not is_company_left or (self.tries > 0 and self._may_go_solo)

    @property
    def quorum(self) -> int:
        """Members that a group needs: most of those that hold this state, and more than have vanished.

        Peers that have gone on from it count: else a few that hear of a round last could go another way.
        """
        if self._may_go_solo:
            return 2
        own = self._tracker.history
        others = self._tracker.others
        gone_on = {one.peer_id for one in others if one.history.rank > own.rank or one.went_by(own)}
        return max(2, (1 + len(gone_on.union(self.groupmates))) // 2 + 1, len(self.vanished) + 1)

    @property
    def _may_go_solo(self) -> bool:
        return time.monotonic() - self.missed_since >= self._rules.solo_after_s


class Equality:
    """Digests the tensors that all peers of a history hold alike, each once while it does not change."""

    def __init__(self, state: ExactStateAverager, tracker: SwarmTracker) -> None:
        self._state = state
        self._tracker = tracker
        self._digest = b""
        self._digests: dict[int, bytes] = {}  # of the tensors that are held in common, by `id`
        self.claimed: dict[str, bytes] = {}
        """What members of a round held, by id, if not all the same and nothing was done about it yet."""

    def digest(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Digest what a round is about, some of the state's common tensors; report what is held of all.

        Raises:
            NotFinite: a common tensor is not finite. Nothing has left this peer.
        """
        if not self._digest:
            common = self._state.common_tensors()
            history = self._state.history
            new = [tensor for tensor in common if id(tensor) not in self._digests]
            for tensor, value in zip(new, host_values(new, self._state.lock_state.changes), strict=True):
                if not are_finite([value]):
                    raise NotFinite(
                        f"The weights of this peer are not finite at step {history.step}; nothing was sent.",
                        hint="run the same command again: it takes the swarm's state, or the last checkpoint",
                    )
                self._digests[id(tensor)] = digest_of([value])
            held = joint_digest(self._digests[id(weight)] for weight in weights)
            self._digest, of_all = held[:STATE_DIGEST_BYTES], (self._digests[id(one)] for one in common)
            self._tracker.attest(history, common_digest(of_all, self._state.own_metadata()))
        return self._digest

    def forget(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """These tensors have changed, in modes with local steps; none given, or in another mode: all."""
        self._digest = b""
        if not changed or self._state.outer is None:
            self._digests = {}
        for tensor in changed:
            self._digests.pop(id(tensor), None)

    def compare(self, claimed: Mapping[str, bytes]) -> None:
        """Note what the members of a round claimed to hold before it, if that was not the same."""
        if len(set(claimed.values())) > 1:
            self.claimed = dict(claimed)

    def restore(self) -> set[str]:
        """Return ids of those whose state to take over, none if most hold this peer's; forget the claims."""
        claimed = self.claimed
        self.claimed = {}
        adopted = state_to_adopt(claimed, self._state.history.digest)
        if claimed.get(self._tracker.own_id, adopted) == adopted:
            return set()
        return {peer for peer, state in claimed.items() if state == adopted}


@dataclass(frozen=True)
class RunSettings:
    """What all peers of a run have alike; below `rules`, hivemind's options as `SwarmOptimizer` was told."""

    pace: Pace = DEFAULT_PACE  # in mode auto, to begin with
    auto_share: float | None = None  # of its time, that training may wait in mode auto; None: another mode
    max_steps: int = 2**31 - 1  # the step of the swarm at which the run ends
    max_grad_norm: float = 0.0  # of an inner optimizer's step, which is scaled down to it; 0: any
    schema: bytes = b""  # peers average only with those that have the same
    rules: RoundRules = RoundRules()
    target_batch_size: int = 256  # samples of a step, of all peers
    average_state_every: int = 1  # steps at least between two states that this peer takes over to be equal
    matchmaking_s: float = 5.0  # that a group usually takes to form
    averaging_s: float = 60.0  # the longest that one try of a round looks for its group
    load_state_s: float = 60.0  # the longest that a peer which gives its state, or a round, may be silent


@dataclass
class Parts:
    """What there is of a peer once, and what each part of its optimizer works with."""

    tracker: SwarmTracker
    gradients: ExactGradientAverager
    state: ExactStateAverager  # the weights, the inner optimizer, and what was committed on the way to them
    alive: Alive
    events: Events
    interest: JoinerActivity
    settings: RunSettings

    def __post_init__(self) -> None:
        self.work, settings = Work(), self.settings
        self.company = Company(self.tracker, settings.rules)
        self.equality = Equality(self.state, self.tracker)
        num_values = sum(param.numel() for param in self.state.main_parameters)
        self.adaptation = Adaptation(
            settings.auto_share, self.interest, num_values, settings.target_batch_size
        )
