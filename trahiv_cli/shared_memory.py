"""Memory that all processes of a peer share, including ones that were forked before it was made."""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import torch

KEEP_S = 45.0  # how long a snapshot is kept for a peer whose stream broke off


def shared_bytes(num_bytes: int) -> torch.Tensor:
    """Return a zeroed uint8 buffer on the CPU that other processes can map; its pages are touched already."""
    storage = torch.UntypedStorage._new_shared(max(num_bytes, 1))  # type: ignore[no-untyped-call]
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)[:num_bytes]
    ctypes.memset(flat.data_ptr(), 0, num_bytes)
    return flat


class SharedNumber:
    """A number in shared memory."""

    def __init__(self, value: float) -> None:
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        self._memory = shared_bytes(dtype.itemsize).view(dtype)
        self.put(value)

    @property
    def value(self) -> Any:
        """The number: a float if the first value was one, else an int."""
        return self._memory[0].item()

    def put(self, value: float) -> None:
        """Replace the number."""
        self._memory[0] = value


class JoinerActivity:
    """The time of the last request from, or transfer to, another peer; shared by all processes of this peer.

    `SwarmOptimizer` makes one for its services.
    """

    def __init__(self) -> None:
        self._noted_at = SharedNumber(-math.inf)  # in `time.monotonic`, which all processes here share

    def note(self) -> None:
        """Record that another peer sends a request, or receives data, now."""
        self._noted_at.put(time.monotonic())

    def was_there_since(self, when: float) -> bool:
        """Whether another peer has sent a request, or received data, since then."""
        return bool(self._noted_at.value >= when)

    @property
    def is_there(self) -> bool:
        """Whether the last one was within `KEEP_S`, so that its peer may come back for more."""
        return self.was_there_since(time.monotonic() - KEEP_S)
