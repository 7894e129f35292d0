"""Readers of this peer's part of the data, if the swarm's peers divide it.

Every peer has the same samples, or can read the same shards of a stream, and knows the same order of each
pass. The swarm's ledger counts positions in that order; this peer trains the positions that it leases.
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
from trahiv_cli.progress.leases import Leases
from trahiv_cli.progress.ledger import SHARD
from trahiv_cli.step.optimizer import SwarmOptimizer
from trahiv_cli.train.comparison import SAMPLES, SHARDS


class Divided:
    """The order of each pass, and the positions in it that this peer's loader has read.

    A pass has a `number` of samples, or of a stream's shards. From `seed` comes another order for each pass,
    the same for all peers; None keeps the order of the data. A batch of the loader has `batch` samples.
    """

    leases: Leases  # the source of positions, from `lease_from` on
    kind = SAMPLES
    unit = 1  # samples that are leased together

    def __init__(self, number: int, batch: int, seed: int | None, should_leave: Callable[[], bool]) -> None:
        self.number = number
        self._batch = batch
        self.seed = seed
        self._should_leave = should_leave
        self.size = {self.kind: str(number)}  # it must be equal on all peers
        self._asked: deque[int] = deque()
        self._drawn: tuple[int, torch.Tensor] = -1, torch.empty(0)

    def lease_from(self, optimizer: SwarmOptimizer) -> None:
        """Divide the data with the swarm's other peers."""
        self.leases = optimizer.divide_data(self.number, unit=self.unit)

    def next_batch(self) -> list[int]:
        """Return the positions of the next batch to train; the loader reads ahead of training."""
        return [self._asked.popleft() for _ in range(self._batch)]

    def index(self, position: int) -> int:
        """Return the index in the data of a sample, or shard, by its `position`, counted over all passes."""
        number, index = divmod(position, self.number)
        if self.seed is None:
            return index
        if self._drawn[0] != number:
            generator = torch.Generator().manual_seed((self.seed + number) % 2**63)
            self._drawn = number, torch.randperm(self.number, generator=generator)
        return int(self._drawn[1][index])


class DividedSampler(Divided, Sampler[int]):
    """Yields indices of the dataset; a pass of the Trainer has the indices of all whole batches."""

    def __len__(self) -> int:
        """Return the number of samples in all whole batches of the dataset."""
        return self.number // self._batch * self._batch

    def __iter__(self) -> Iterator[int]:
        """Yield the next indices."""
        for _ in range(len(self)):
            if (position := self.leases.take(self._should_leave)) is None:
                return
            self._asked.append(position)
            yield self.index(position)


class DividedPrompts(Divided, Sampler[int]):
    """Yields indices of prompts in the structure of `order`, a `RepeatSampler` of TRL, as GRPO needs them.

    A chunk has the prompts of one generation: each is there as often as it has completions, and the chunk is
    repeated for each batch that trains on them. The unit of a lease is a prompt. Its positions are its
    completions, each as often as it is trained, so all completions of a prompt belong to one peer.
    """

    def __init__(self, order: Any, batch: int, seed: int | None, should_leave: Callable[[], bool]) -> None:
        super().__init__(len(order.data_source), batch, seed if order.shuffle else None, should_leave)
        self._order = order
        self.unit = samples_of_a_prompt(order, batch)

    def __len__(self) -> int:
        """Return the number of indices in all whole chunks of the dataset."""
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """Yield the next indices."""
        order = self._order
        copies = order.mini_repeat_count
        for _ in range(self.number // order.batch_size):
            chunk = []
            for _ in range(order.batch_size):
                if (start := self.leases.take(self._should_leave)) is None:
                    return
                chunk.append(start)
            for first in range(0, self.unit, copies):
                self._asked.extend(start + first + copy for start in chunk for copy in range(copies))
            indices = [self.index(start // self.unit) for start in chunk for _ in range(copies)]
            for _ in range(order.repeat_count):
                yield from indices


class DividedStream(Divided, IterableDataset[Any]):
    """Reads this peer's shards of a stream, pass after pass, without an end.

    No peer shuffles the stream itself: the seed draws an order of the shards and of the samples in each.
    """

    kind = SHARDS
    unit = SHARD

    def __init__(self, stream: datasets.IterableDataset, *more: Any) -> None:
        super().__init__(shards_of(stream), *more)
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        """Yield the next samples."""
        while (start := self.leases.take(self._should_leave)) is not None:
            # Not contiguous, so that concatenated datasets are mixed in each shard.
            number = start // SHARD
            shard = self._stream.shard(self.number, self.index(number), contiguous=False)
            if self.seed is not None:
                seed = (self.seed + number) % 2**63
                shard = shuffled_stream(shard, seed)
            for position, sample in self.leases.read(start, shard):
                self._asked.append(position)
                yield sample


def samples_of_a_prompt(order: Any, batch: int) -> int:
    """Return how many samples a prompt trains: its completions, each as often as it is trained.

    `order` is TRL's `RepeatSampler`: a chunk of prompts is there once for each `batch` that trains on it.
    """
    return int(order.repeat_count * batch // order.batch_size)


def divide(
    samples: Any,
    args: TrainingArguments,
    strategy: str,
    should_leave: Callable[[], bool],
    prompts: Any = None,
) -> Divided | None:
    """Return a reader of this peer's part of the data; None if peers can't divide the data.

    They can't divide a stream of one shard, a stream with loader workers, data without a length, or a dataset
    whose order (`strategy`) is neither random nor sequential. `prompts` is TRL's order of prompts.
    """
    batch = args.per_device_train_batch_size
    seed = args.seed if args.data_seed is None else args.data_seed
    if prompts is not None:
        return DividedPrompts(prompts, batch, seed, should_leave)
    if strategy != "random":
        seed = None
    if not is_divisible(samples, args.dataloader_num_workers):
        return None
    if isinstance(samples, datasets.IterableDataset):
        return DividedStream(samples, batch, seed, should_leave)
    if strategy not in ("random", "sequential"):
        return None
    return DividedSampler(len(samples), batch, seed, should_leave)
