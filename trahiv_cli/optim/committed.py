"""The committed state of a peer: one value, which changes together with its weights, under one lock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.swarm.host_copies import StateLock


@dataclass(frozen=True)
class Committed:
    """The facts that belong to a peer's weights."""

    history: History = History()
    """The committed steps behind the weights."""

    ledger: Ledger = Ledger()
    """The positions of the data that these steps have trained."""

    pace: Pace = DEFAULT_PACE
    """Mode, codec and local steps of the next round."""

    group: frozenset[str] = frozenset()
    """Ids of the members of the round that led here, or of the donor of a downloaded state."""


class CommittedCell:
    """Holds the present `Committed` of a peer. `SwarmOptimizer` makes one, which its parts share.

    Hold `lock` while it changes together with weights and optimizer state.
    """

    def __init__(self, first: Committed) -> None:
        self.now = first
        self.lock = StateLock()

    def change(self, **changes: Any) -> None:
        """Replace fields of the present value."""
        self.now = replace(self.now, **changes)
