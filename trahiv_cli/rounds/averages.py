"""The tensors that rounds average, in memory that the training process and the DHT's process share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from trahiv_cli.shared_memory import shared_bytes


class Averages:
    """Float32 tensors of the given shapes, views of one block of shared memory on the CPU.

    `lock` is a lock of both processes. It is not pickled: each process sets its own.
    """

    def __init__(self, shapes: Sequence[torch.Size], lock: AbstractContextManager[Any]) -> None:
        block = shared_bytes(sum(4 * shape.numel() for shape in shapes)).view(torch.float32)
        self.__setstate__((tuple(shapes), block))
        self.lock = lock

    def __getstate__(self) -> tuple[tuple[torch.Size, ...], torch.Tensor]:
        return self._shapes, self._block

    def __setstate__(self, state: tuple[tuple[torch.Size, ...], torch.Tensor]) -> None:
        self._shapes, self._block = state
        parts = self._block.split([shape.numel() for shape in self._shapes])  # type: ignore[no-untyped-call]
        self.tensors = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        """The tensors; hold the lock while you read or write them."""

    def set_lock(self, lock: AbstractContextManager[Any]) -> None:
        """Use this process's copy of the lock, which pickling has left out."""
        self.lock = lock

    @contextmanager
    def locked(self) -> Iterator[list[torch.Tensor]]:
        """Hold the lock within the block; yield the tensors."""
        with self.lock:
            yield self.tensors
