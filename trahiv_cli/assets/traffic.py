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
    "blockwise4": 4,
}
"""Of one encoded value."""

_TABLE_BYTES = {"float16": 2, "meanstd16": 6, "quantile8": 1024}
"""What comes with each part beside its values (`optim/codecs.py`)."""

_BLOCKS = {"uniform8": (1024, 4), "blockwise8": (256, 4), "blockwise4": (64, 2)}
"""Values that share one scale, and the bytes of a scale."""


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
    """Count the bytes of float32 tensors in a codec.

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
        total += -(-num_values * _BITS[codec] // 8) + len(sizes) * _TABLE_BYTES.get(codec, 0)
        if codec in _BLOCKS:
            block, scale_bytes = _BLOCKS[codec]
            total += sum(scale_bytes * -(-size // block) for size in sizes)
    return total
