"""How this peer reads its part of the data, where the swarm's peers divide it.

Every peer holds the same samples, or can read the same shards of a stream, and knows the same order of each
pass. The swarm's ledger counts positions in that order; which ones are this peer's comes from its leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from torch.utils.data import IterableDataset, Sampler
from transformers import TrainingArguments

from trahiv_cli.assets.data import is_divisible, shards_of, shuffled_stream
from trahiv_cli.optim.leases import Leases
from trahiv_cli.optim.ledger import SHARD
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.train.comparison import SAMPLES, SHARDS


class Divided:
    """The order of each pass, and the positions in it that this peer's loader has asked for.

    A pass has a `number` of samples, or of a stream's shards; `seed` draws another order for each, the same
    for all peers, and None leaves that of the data. The loader delivers a `batch` of samples at once.
    """

    leases: Leases  # where positions come from
    is_stream = False

    def __init__(self, number: int, batch: int, seed: int | None, should_leave: Callable[[], bool]) -> None:
        self.number = number
        self._batch = batch
        self.seed = seed
        self._should_leave = should_leave
        self.size = {SHARDS if self.is_stream else SAMPLES: str(number)}  # what must be the same on all peers
        self._asked: deque[int] = deque()
        self._drawn: tuple[int, torch.Tensor] = -1, torch.empty(0)

    def lease_from(self, optimizer: SwarmOptimizer) -> None:
        """Divide the data with the swarm's other peers."""
        self.leases = optimizer.divide_data(self.number, is_stream=self.is_stream)

    def next_batch(self) -> list[int]:
        """Return the positions of the next batch that the loader delivered; it asks ahead of training."""
        return [self._asked.popleft() for _ in range(self._batch)]

    def index(self, position: int) -> int:
        """Return the place in the data of what comes at `position`, which is counted over all passes."""
        number, index = divmod(position, self.number)
        if self.seed is None:
            return index
        if self._drawn[0] != number:
            generator = torch.Generator().manual_seed((self.seed + number) % 2**63)
            self._drawn = number, torch.randperm(self.number, generator=generator)
        return int(self._drawn[1][index])


class DividedSampler(Divided, Sampler[int]):
    """Gives indices of the dataset, in each pass of the Trainer as many as there are in whole batches."""

    def __len__(self) -> int:
        """Samples in all whole batches of the dataset."""
        return self.number // self._batch * self._batch

    def __iter__(self) -> Iterator[int]:
        """Give the next indices."""
        for _ in range(len(self)):
            if (position := self.leases.take(self._should_leave)) is None:
                return
            self._asked.append(position)
            yield self.index(position)


class DividedStream(Divided, IterableDataset[Any]):
    """Reads this peer's shards of a stream, pass after pass, without an end.

    No peer shuffles the stream itself: the seed draws an order of the shards and of the samples in each.
    """

    is_stream = True

    def __init__(self, stream: datasets.IterableDataset, *more: Any) -> None:
        super().__init__(shards_of(stream), *more)
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        """Give the next samples."""
        while (start := self.leases.take(self._should_leave)) is not None:
            # Not neighbours: data sets that were put one after the other are mixed in each shard.
            number = start // SHARD
            shard = self._stream.shard(self.number, self.index(number), contiguous=False)
            if self.seed is not None:
                seed = (self.seed + number) % 2**63
                shard = shuffled_stream(shard, seed)
            for position, sample in self.leases.read(start, shard):
                self._asked.append(position)
                yield sample


def divide(
    samples: Any, args: TrainingArguments, should_leave: Callable[[], bool]
) -> DividedSampler | DividedStream | None:
    """Make what reads this peer's part of the data; None where that has no shards or no plain order."""
    batch = args.per_device_train_batch_size
    strategy = args.train_sampling_strategy
    seed = args.data_seed if args.data_seed is not None else args.seed
    order = batch, seed if strategy == "random" else None, should_leave
    if not is_divisible(samples, args.dataloader_num_workers):
        return None
    if isinstance(samples, datasets.IterableDataset):
        return DividedStream(samples, *order)
    return DividedSampler(len(samples), *order) if strategy in ("random", "sequential") else None
