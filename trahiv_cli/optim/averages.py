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
        self._shapes = tuple(shapes)
        self._block = shared_bytes(sum(4 * shape.numel() for shape in shapes)).view(torch.float32)
        self.lock = lock

    def __getstate__(self) -> dict[str, Any]:
        return {"_shapes": self._shapes, "_block": self._block}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors; hold the lock while you read or write them."""
        sizes = [shape.numel() for shape in self._shapes]
        parts = self._block.split(sizes)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @contextmanager
    def locked(self) -> Iterator[list[torch.Tensor]]:
        """Hold the lock within the block; yield the tensors."""
        with self.lock:
            yield self.tensors
