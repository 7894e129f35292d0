"""How many bytes a run sends and receives, and how long that takes: arithmetic, no socket is opened.

Covered: encoded tensors. Not covered: the transport's framing and what peers tell each other besides,
together about one part in a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trahiv_cli.recipe.schema import CompressionName

SPEEDS_MBPS = (5, 20, 100, 1000)
"""Uplinks to reckon with, in megabits a second: mobile, home, office, data centre."""

PART_BYTES = 2**19
"""hivemind cuts tensors into parts of so many encoded bytes (averaging/partition.py:17)."""

_BITS: dict[CompressionName, int] = {
    "none": 32,
    "float16": 16,
    "meanstd16": 16,
    "uniform8": 8,
    "quantile8": 8,
    "blockwise8": 8,
}
"""Of one encoded value."""

_CODEBOOK_BYTES = 4 * 256
_COUNT_BYTES = 8
_BLOCK = 4096
"""hivemind/compression/quantization.py:39,196: the values that share one scale in `blockwise8`."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that pass between this peer and the others."""

    gradient_bytes: int
    """The trained weights' gradients, encoded, once."""

    weights_bytes: int
    """The trained weights, encoded, once."""

    average_state_every: int
    """Steps from one averaging of the weights to the next."""

    state_bytes: int
    """What a joiner downloads: weights and optimizer state."""

    def sent_in_round(self, num_peers: int) -> int:
        """Bytes that a peer sends, and receives, in a round of `num_peers`.

        Each reduces a share of its own for all others: it sends them the rest of its gradients, and then
        the average of its share. Twice the gradients is the limit, however many peers there are.
        """
        return round(2 * self.gradient_bytes * (num_peers - 1) / num_peers)

    def sent_in_averaging(self, num_peers: int) -> int:
        """Bytes that a peer sends, and receives, when the weights are averaged too."""
        return round(2 * self.weights_bytes * (num_peers - 1) / num_peers)


def seconds(num_bytes: int, mbps: float) -> float:
    """Say how long `num_bytes` take at `mbps` million bits a second."""
    return 8 * num_bytes / (mbps * 1e6)


def encoded_bytes(shapes: Iterable[torch.Size], codec: CompressionName, *, has_parts: bool) -> int:
    """Count the bytes of float32 tensors in a codec of `hivemind.compression`.

    Args:
        shapes: of the tensors.
        codec: its name in a recipe.
        has_parts: cut into parts first, as for averaging; a state download encodes each tensor whole.
    """
    part_values = PART_BYTES * 8 // _BITS[codec]
    total = 0
    for shape in shapes:
        num_values = shape.numel()
        sizes = [num_values]
        if has_parts:
            whole, rest = divmod(num_values, part_values)
            sizes = [part_values] * whole + [rest] * (rest > 0)
        num_rows = len(sizes) if has_parts else num_values // (shape[-1] if shape else 1)
        total += num_values * _BITS[codec] // 8
        if codec == "meanstd16":
            total += 8 * num_rows
        elif codec == "blockwise8":
            total += sum(4 * -(-size // _BLOCK) + _CODEBOOK_BYTES + 2 * _COUNT_BYTES for size in sizes)
        elif codec in ("uniform8", "quantile8"):
            total += len(sizes) * (_CODEBOOK_BYTES + _COUNT_BYTES)
    return total
