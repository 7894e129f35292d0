"""Settings of a run that its optimizer follows."""

from __future__ import annotations

from dataclasses import dataclass

from trahiv_cli.progress.pace import DEFAULT_PACE, Pace, RoundRules
from trahiv_cli.progress.scores import BestScore


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
    keeps_best: BestScore | None = None  # whether peers keep the weights with this score; None: they do not
    schema: bytes = b""  # peers average only with peers of the same schema
    rules: RoundRules = RoundRules()
    target_batch_size: int = 256  # samples of a step, over all peers
    average_state_every: int = 1  # least number of steps between two adoptions of equal weights
    matchmaking_s: float = 5.0  # time that a group usually takes to form
    averaging_s: float = 60.0  # the longest that one try of a round looks for its group
    load_state_s: float = 60.0  # the longest that a peer which gives its state, or a round, may be silent
