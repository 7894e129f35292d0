"""The order in which this peer reads its part of the data: positions of the swarm's ledger as a Sampler.

Every peer holds the same samples and knows the same order of each pass; which positions are this one's comes
from its leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from trahiv_cli.optim.leases import Leases


class DividedSampler(Sampler[int]):
    """Gives places in the dataset, as many as there are whole batches, and remembers their positions.

    A loader asks ahead of training; it delivers in the order in which it asked.

    Args:
        num_samples: in the dataset.
        batch: samples in each batch.
        seed: draws the order of each pass, the same for all peers; None: the order of the dataset.
        should_leave: True ends it early.
    """

    def __init__(
        self, num_samples: int, batch: int, seed: int | None, should_leave: Callable[[], bool]
    ) -> None:
        self.leases: Leases | None = None
        """Where positions come from; set before the first is asked for."""
        self._num_samples, self._batch, self._seed = num_samples, batch, seed
        self._should_leave = should_leave
        self._asked: deque[int] = deque()
        self._order: tuple[int, torch.Tensor | None] = -1, None

    def __len__(self) -> int:
        """Samples in all whole batches of the dataset."""
        return self._num_samples // self._batch * self._batch

    def __iter__(self) -> Iterator[int]:
        """Give the next places."""
        assert self.leases is not None
        for _ in range(len(self)):
            position = self.leases.take(self._should_leave)
            if position is None:
                return
            self._asked.append(position)
            yield self.place(position)

    def place(self, position: int) -> int:
        """Return the place in the dataset of a position."""
        number, place = divmod(position, self._num_samples)
        if self._seed is None:
            return place
        if self._order[0] != number:
            generator = torch.Generator().manual_seed((self._seed + number) % 2**63)
            self._order = number, torch.randperm(self._num_samples, generator=generator)
        order = self._order[1]
        assert order is not None
        return int(order[place])

    def delivered(self) -> list[int]:
        """Return the positions of the next batch that the loader delivered."""
        return [self._asked.popleft() for _ in range(self._batch)]
