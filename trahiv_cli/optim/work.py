"""A peer knows which samples it has worked on, where the peers of a swarm divide the data."""

from __future__ import annotations

from collections.abc import Sequence

from trahiv_cli.optim.leases import Leases, ShardLeases
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.soundness import USELESS_AT_MOST


class Work:
    """The positions whose gradients, or own steps, this peer holds; without leases it knows of none."""

    def __init__(self) -> None:
        self.leases: Leases | None = None
        """The leases that positions come from; None: the data is not divided."""
        self._announced: list[int] = []
        self._held: list[int] = []
        """In the order in which their gradients came."""
        self._useless: list[int] = []

    @property
    def unit(self) -> int:
        """Positions that are leased as one."""
        return self.leases.unit if self.leases is not None else 1

    def announce(self, positions: Sequence[int]) -> None:
        """Expect the gradients of these."""
        self._announced += positions

    def count_announced(self) -> None:
        """The gradients of what was announced are there."""
        self._held, self._announced = [*self._held, *self._announced], []

    def forget_announced(self, but: Sequence[int] = ()) -> None:
        """Have what was announced trained again, but for these: they are announced anew."""
        kept = set(but)
        self._give_back([position for position in self._announced if position not in kept])
        self._announced = []

    def drop(self, num_held: int, *, are_useless: bool = False) -> None:
        """Forget those whose gradients are gone: always the last ones.

        Args:
            num_held: samples whose gradients are left.
            are_useless: whether their gradients were not finite. Such samples are not trained again: their
                gradients would not be finite then, either.
        """
        if self.leases is None:
            return
        gone = self._held[num_held:]
        del self._held[num_held:]
        if are_useless:
            self._useless = [*self._useless, *gone][-USELESS_AT_MOST:]
        else:
            self._give_back(gone)

    def aside(self, num_samples: int) -> Spans:
        """Return the positions of the first samples, which a round is about, and of the useless ones."""
        mine = Spans.of_positions([*self._held[:num_samples], *self._useless])
        if not isinstance(self.leases, ShardLeases):
            return mine
        return mine | Spans.of_positions(self.leases.last_positions(mine))

    def settle(self, num_samples: int, brought: Spans) -> None:
        """A round of this peer's was committed, about its first samples, so many, with these positions."""
        if self.leases is None:
            return
        del self._held[:num_samples]
        self._useless = []
        self.leases.settle(brought)

    def leave_to_others(self, num_held: int) -> None:
        """Others' rounds were gone through; see `drop` for `num_held`."""
        self.drop(num_held)
        if self.leases is not None:
            self.leases.settle(())

    def figures(self, ledger: Ledger) -> dict[str, int] | None:
        """Return how much of the data was trained; None where it is not divided.

        `passes` are complete; `covered` samples of those after them, of `samples` in each, or `shards` of a
        stream; `duplicates` were trained twice in a pass; `lost` positions (or shards) this peer had leased
        when others took them over.
        """
        if self.leases is None:
            return None
        passes, covered = ledger.passes(self.leases.num_samples)
        name = "shards" if isinstance(self.leases, ShardLeases) else "samples"
        return {
            "passes": passes,
            "covered": covered // self.unit,
            name: self.leases.num_samples // self.unit,
            "duplicates": ledger.duplicates,
            "lost": self.leases.lost,
        }

    def _give_back(self, positions: list[int]) -> None:
        if self.leases is not None:
            self.leases.give_back(positions)
