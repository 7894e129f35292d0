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

from trahiv_cli.assets.data import STREAM_BUFFER, is_divisible, shards_of
from trahiv_cli.optim.leases import Leases, ShardLeases
from trahiv_cli.optim.ledger import SHARD
from trahiv_cli.optim.optimizer import SwarmOptimizer
from trahiv_cli.swarm.alike import SAMPLES, SHARDS


class Order:
    """The order of a pass, the same for all peers.

    Args:
        size: samples or shards in a pass.
        seed: draws another order for each pass; None: always that of the data.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size, self._seed = size, seed
        self._drawn: tuple[int, torch.Tensor | None] = -1, None

    def index(self, position: int) -> int:
        """Return where in the data that is which comes at `position`, counted over all passes."""
        number, index = divmod(position, self._size)
        if self._seed is None:
            return index
        if self._drawn[0] != number:
            generator = torch.Generator().manual_seed((self._seed + number) % 2**63)
            self._drawn = number, torch.randperm(self._size, generator=generator)
        order = self._drawn[1]
        assert order is not None
        return int(order[index])


class Delivery:
    """Remembers which positions a loader asked for: it asks ahead of training, and delivers in that order."""

    def __init__(self, batch: int) -> None:
        self._batch, self._asked = batch, deque[int]()

    def ask(self, position: int) -> None:
        """Note a sample that the loader has asked for."""
        self._asked.append(position)

    def next_batch(self) -> list[int]:
        """Return the positions of the next batch that the loader delivered."""
        return [self._asked.popleft() for _ in range(self._batch)]


class DividedSampler(Sampler[int]):
    """Gives indices of the dataset, in each pass of the Trainer as many as there are whole batches.

    It ends early when `should_leave`; `seed` is that of `Order`.
    """

    def __init__(
        self, num_samples: int, batch: int, seed: int | None, should_leave: Callable[[], bool]
    ) -> None:
        self.leases: Leases | None = None
        """Where positions come from; set before the first is asked for."""
        self.delivery = Delivery(batch)
        self.size = {SAMPLES: str(num_samples)}
        """What must be the same on all peers: see `swarm.alike`."""
        self._num_samples, self._batch = num_samples, batch
        self._order, self._should_leave = Order(num_samples, seed), should_leave

    def lease_from(self, optimizer: SwarmOptimizer) -> None:
        """Divide the data with the swarm's other peers."""
        self.leases = optimizer.divide_data(self._num_samples)

    def __len__(self) -> int:
        """Samples in all whole batches of the dataset."""
        return self._num_samples // self._batch * self._batch

    def __iter__(self) -> Iterator[int]:
        """Give the next indices."""
        assert self.leases is not None
        for _ in range(len(self)):
            position = self.leases.take(self._should_leave)
            if position is None:
                return
            self.delivery.ask(position)
            yield self._order.index(position)


class DividedStream(IterableDataset[Any]):
    """Reads this peer's shards of a stream, pass after pass, without an end.

    The stream must be the same on all peers, and shuffled by none. In each pass `seed` draws an order of the
    shards and of the samples in each, the same for all peers; None: that of the stream. It ends early when
    `should_leave`.
    """

    def __init__(
        self, stream: datasets.IterableDataset, batch: int, seed: int | None, should_leave: Callable[[], bool]
    ) -> None:
        self.leases: ShardLeases | None = None
        """Where shards come from; set before the first is read."""
        self.delivery = Delivery(batch)
        self.num_shards = shards_of(stream)
        self.size = {SHARDS: str(self.num_shards)}
        """What must be the same on all peers: see `swarm.alike`."""
        self._stream, self._seed = stream, seed
        self._order, self._should_leave = Order(self.num_shards, seed), should_leave

    def lease_from(self, optimizer: SwarmOptimizer) -> None:
        """Divide the shards with the swarm's other peers."""
        self.leases = optimizer.divide_stream(self.num_shards)

    def __iter__(self) -> Iterator[Any]:
        """Give the next samples."""
        assert self.leases is not None
        while (start := self.leases.take(self._should_leave)) is not None:
            position = start
            for sample in self._read(start // SHARD):
                if not self.leases.has(start):
                    break
                if self.leases.hand_out(position):
                    self.delivery.ask(position)
                    yield sample
                position += 1
            else:
                self.leases.note_end(start, position)

    def _read(self, number: int) -> datasets.IterableDataset:
        """Read one shard from its beginning, in the order that it has in its pass."""
        # Not neighbours: data sets that were put one after the other are mixed in each shard.
        shard = self._stream.shard(self.num_shards, self._order.index(number), contiguous=False)
        if self._seed is None:
            return shard
        seed = (self._seed + number) % 2**63
        return shard.shuffle(seed=seed, buffer_size=STREAM_BUFFER, max_buffer_input_shards=1)


def divide(
    samples: Any, args: TrainingArguments, should_leave: Callable[[], bool]
) -> DividedSampler | DividedStream | None:
    """Make what reads this peer's part of the data; None where that has no shards or no plain order.

    `samples` are of any kind that a `Trainer` takes.
    """
    batch, strategy = args.per_device_train_batch_size, args.train_sampling_strategy
    seed = args.data_seed if args.data_seed is not None else args.seed
    order_seed = seed if strategy == "random" else None
    if not is_divisible(samples, args.dataloader_num_workers):
        return None
    if isinstance(samples, datasets.IterableDataset):
        return DividedStream(samples, batch, order_seed, should_leave)
    if strategy not in ("random", "sequential"):
        return None
    return DividedSampler(len(samples), batch, order_seed, should_leave)
