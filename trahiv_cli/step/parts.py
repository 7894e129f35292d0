"""Objects that all components of one peer's optimizer share (`Parts`), and two small components.

- `Company` decides which peers the next group needs, and whether this peer may step without them.
- `Equality` digests the tensors that peers share, and finds the peers whose state to adopt if they differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trahiv_cli.errors import NotFinite
from trahiv_cli.progress.leases import Work
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace, RoundRules
from trahiv_cli.progress.tracker import SwarmTracker
from trahiv_cli.rounds.claims import are_finite, state_to_adopt
from trahiv_cli.rounds.round_service import Rounds
from trahiv_cli.rounds.vote import digest_of, joint_digest
from trahiv_cli.shared_memory import JoinerActivity
from trahiv_cli.state.host_copies import host_values
from trahiv_cli.state.peer_state import PeerState, common_digest
from trahiv_cli.state.state_service import StateExchange
from trahiv_cli.step.auto import Adaptation
from trahiv_cli.step.gradients import GradientBuffer
from trahiv_cli.swarm.watchdog import Alive
from trahiv_cli.telemetry.events import Events

STATE_DIGEST_BYTES = 8


class Company:
    """Decides which other peers the next step needs, by their reports, which are a little old."""

    def __init__(self, tracker: SwarmTracker, rules: RoundRules) -> None:
        self._tracker = tracker
        self._rules = rules
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last search for a group: a step was taken, or a state adopted."""
        self.missed_since = float("inf")  # when this peer began to look for its group, in monotonic seconds
        self.tries = 0  # rounds for the next step that were not committed
        self.said_after_s = 0.0  # how long this peer had been looking at the last warning

    @property
    def groupmates(self) -> list[str]:
        """Ids of the peers that hold this peer's state, or are about to.

        Members of the round that led here count however old their reports are: otherwise a quick peer would
        go on without them.
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
        """Ids of the last group's members that report no more and did not say goodbye."""
        there = {peer.peer_id for peer in self._tracker.others} | {self._tracker.own_id}
        return set(self._tracker.companions) - there - self._tracker.gone

    @property
    def may_step_alone(self) -> bool:
        """Whether this peer may step with its own gradients; peers that are behind count as company."""
        is_company_left = bool(self._tracker.others or self.vanished)
        return not is_company_left or (self.tries > 0 and self._may_go_solo)

    @property
    def quorum(self) -> int:
        """The number of members that a group needs.

        It is more than half of the peers that hold this state, and more than the number that vanished; 2 if
        this peer may go solo. Peers that have gone on from this state count, too: otherwise the last few
        peers to learn of a round could follow another history.
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
    """Digests the tensors that all peers of a history share, each once while it does not change."""

    def __init__(self, state: PeerState, tracker: SwarmTracker) -> None:
        self._state = state
        self._tracker = tracker
        self._digest = b""
        self._digests: dict[int, bytes] = {}  # of the shared tensors, by `id`
        self.claimed: dict[str, bytes] = {}
        """Digests claimed in a round, by peer id, if they differed and `restore` was not called since."""

    def digest(self, weights: Sequence[torch.Tensor]) -> bytes:
        """Digest `weights`, the shared tensors of a round; report the digest of all shared tensors.

        Raises:
            NotFinite: a shared tensor is not finite. Nothing has left this peer.
        """
        if not self._digest:
            common = self._state.common_tensors()
            history = self._state.committed.now.history
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
        """Forget the digests of `changed` tensors; of all without any, or in modes without local steps."""
        self._digest = b""
        if not changed or self._state.outer is None:
            self._digests = {}
        for tensor in changed:
            self._digests.pop(id(tensor), None)

    def compare(self, claimed: Mapping[str, bytes]) -> None:
        """Record the digests that the members of a round claimed before it, if they differ."""
        self.claimed = dict(claimed) if len(set(claimed.values())) > 1 else {}

    def restore(self) -> set[str]:
        """Return ids of the peers whose state to adopt, none if most have this peer's; forget the claims."""
        claimed = self.claimed
        self.claimed = {}
        adopted = state_to_adopt(claimed, self._state.committed.now.history.digest)
        if claimed.get(self._tracker.own_id, adopted) == adopted:
            return set()
        return {peer for peer, state in claimed.items() if state == adopted}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    The fields down to `rules` are the same for all peers. The fields below are options of hivemind, which
    `SwarmOptimizer` fills in.
    """

    pace: Pace = DEFAULT_PACE  # in mode auto, the first one
    auto_share: float | None = None  # share of its time that training may wait in mode auto; None: not auto
    max_steps: int = 2**31 - 1  # the step of the swarm at which the run ends
    max_grad_norm: float = 0.0  # gradients are scaled down to it before an inner step; 0: no limit
    schema: bytes = b""  # peers average only with peers of the same schema
    rules: RoundRules = RoundRules()
    target_batch_size: int = 256  # samples of a step, over all peers
    average_state_every: int = 1  # least number of steps between two adoptions of equal weights
    matchmaking_s: float = 5.0  # time that a group usually takes to form
    averaging_s: float = 60.0  # the longest that one try of a round looks for its group
    load_state_s: float = 60.0  # the longest that a peer which gives its state, or a round, may be silent


@dataclass
class Parts:
    """Objects that all components of one peer's optimizer share. `SwarmOptimizer` creates and keeps them."""

    tracker: SwarmTracker
    gradients: GradientBuffer
    rounds: Rounds
    state: PeerState
    exchange: StateExchange
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
