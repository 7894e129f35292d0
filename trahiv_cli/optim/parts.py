"""What the parts of one peer's optimizer share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trahiv_cli.optim.adaptation import Adaptation
from trahiv_cli.optim.alive import Alive
from trahiv_cli.optim.company import Company
from trahiv_cli.optim.equality import Equality
from trahiv_cli.optim.gradients import ExactGradientAverager
from trahiv_cli.optim.progress import SwarmTracker
from trahiv_cli.optim.rules import RoundRules
from trahiv_cli.optim.state import ExactStateAverager
from trahiv_cli.optim.work import Work
from trahiv_cli.swarm.snapshot import JoinerActivity
from trahiv_cli.telemetry.events import Events


@dataclass(frozen=True)
class Limits:
    """How long a peer waits, in seconds, and how much it trains."""

    matchmaking_s: float
    """How long a group usually takes to form."""

    averaging_s: float
    """The longest that one try of a round looks for its group."""

    allreduce_s: float
    """The longest that an exchange takes."""

    load_state_s: float
    """The longest that a peer which gives its state, or a round, may be silent."""

    target_batch_size: int
    """Samples of a step, of all peers."""

    max_steps: int
    """The step of the swarm at which the run ends."""

    max_grad_norm: float = 0.0
    """The gradient of an inner optimizer's step is scaled down to this norm; 0 leaves it."""

    average_state_every: int = 1
    """Steps after which peers whose weights have come to differ hold the same again."""


@dataclass
class Parts:
    """What there is of a peer once, and what each part of its optimizer works with."""

    tracker: SwarmTracker
    """The reports of all peers."""

    gradients: ExactGradientAverager
    """What a round averages."""

    state: ExactStateAverager
    """The weights, the inner optimizer, and what was committed on the way to them."""

    alive: Alive
    events: Events
    interest: JoinerActivity
    """The interest of joiners in this peer's state."""

    limits: Limits
    rules: RoundRules
    schema: bytes = b""
    """Peers average only with those that have the same."""

    auto_share: float | None = None
    """The share of its time that training may wait for rounds in mode auto; None: the pace stays."""

    notices: deque[Callable[[], None]] = field(default_factory=deque)
    """What a round has noticed: to be called by the thread that trains."""

    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        self.company = Company(self.tracker, self.rules)
        self.equality = Equality(self.state, self.tracker)
        num_values = sum(param.numel() for param in self.state.main_parameters)
        self.adaptation = Adaptation(
            self.auto_share, self.interest, num_values, self.limits.target_batch_size
        )
