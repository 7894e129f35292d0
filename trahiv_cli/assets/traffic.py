"""How many bytes a run sends and receives, and how long that takes: arithmetic, no socket is opened.

Covered: encoded tensors. Not covered: the transport's framing and what peers tell each other besides,
together about one part in a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from trahiv_cli.recipe.schema import CompressionName, OptSection, SwarmSection

SPEEDS_MBPS = (5, 20, 100, 1000)
"""Uplinks to reckon with, in megabits a second: mobile, home, office, data centre."""

PART_BYTES = 2**19
"""hivemind cuts tensors into parts of so many encoded bytes (averaging/partition.py:17)."""

_BITS: dict[CompressionName, int] = {
    "none": 32,
    "float16": 16,
    "uniform8": 8,
    "blockwise8": 8,
    "blockwise4": 4,
}
_HEADER_BYTES = {"float16": 2}
_BLOCKS = {"uniform8": (1024, 4), "blockwise8": (256, 4), "blockwise4": (64, 2)}
"""By codec (`optim/codecs.py`): the bits of a value; what comes with each part beside its values; how many
values share a scale, and the bytes of a scale."""

AUTO_CODECS: tuple[CompressionName, ...] = ("float16", "uniform8", "blockwise4")
"""What mode auto chooses from (`optim/auto.py`), the longest first."""

STATISTICS_CODEC: CompressionName = "blockwise8"
"""About as long as those that a joiner's statistics come in where peers take local steps: 8 bits a value."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that pass between this peer and the others."""

    gradient_bytes: int
    """One copy of what is exchanged, encoded: the trained weights' gradients, or what local steps changed of
    the weights. In mode auto in the longest of its codecs."""

    state_bytes: int
    """What a joiner downloads: weights and optimizer state, and with local steps the outer momentum."""

    steps_per_round: int = 1
    """Steps from one exchange to the next."""

    num_fragments: int = 1
    """Exchanges until each weight was in one."""

    by_choice: dict[str, int] = field(default_factory=dict)
    """In mode auto, one copy in each of its codecs, and of a fragment in the shortest; else empty."""

    def sent_in_round(self, num_peers: int) -> int:
        """Count the bytes that a peer sends, and receives, in a round; of fragments, an average one's.

        Each reduces a share of its own for all others: it sends them the rest of its gradients, and then
        the average of its share. Twice the gradients is the limit, however many peers there are.
        """
        return round(2 * self.gradient_bytes / self.num_fragments * (num_peers - 1) / num_peers)

    def sent_by_choice(self, num_peers: int) -> dict[str, int]:
        """Count the bytes that a peer sends, and receives, in a round, by what mode auto may choose."""
        return {
            choice: round(2 * num_bytes * (num_peers - 1) / num_peers)
            for choice, num_bytes in self.by_choice.items()
        }


def add_up_traffic(
    shapes: Sequence[torch.Size],
    statistics_bytes: int,
    opt: OptSection,
    swarm: SwarmSection,
    *,
    are_float32: bool,
) -> Traffic:
    """Add up what a recipe's mode and codecs make of trained weights of these shapes.

    `statistics_bytes` of optimizer state go to a joiner as they are, or, if they `are_float32` and peers take
    local steps, in 8 bits.
    """
    one_copy = encoded_bytes(shapes, "none", has_parts=False)
    has_local_steps = swarm.mode in ("diloco", "streaming")
    auto = (opt.grad_compression,) if opt.grad_compression is not None else AUTO_CODECS
    codecs = auto if swarm.mode == "auto" else (opt.grad_compression or "none",)
    encoded: dict[str, int] = {codec: encoded_bytes(shapes, codec, has_parts=True) for codec in codecs}
    state = encoded_bytes(shapes, opt.load_state_compression, has_parts=False)
    if swarm.may_step_locally:
        state += one_copy
    if has_local_steps and are_float32 and one_copy:
        in_8_bits = encoded_bytes(shapes, STATISTICS_CODEC, has_parts=False)
        statistics_bytes = statistics_bytes * in_8_bits // one_copy
    num_fragments = min(swarm.fragments, swarm.local_steps) if swarm.mode == "streaming" else 1
    return Traffic(
        gradient_bytes=encoded[codecs[0]],
        state_bytes=state + statistics_bytes,
        steps_per_round=-(-swarm.local_steps // num_fragments) if has_local_steps else 1,
        num_fragments=num_fragments,
        by_choice={**encoded, "a fragment": min(encoded.values()) // swarm.fragments}
        if swarm.mode == "auto"
        else {},
    )


def seconds(num_bytes: int, mbps: float) -> float:
    """Say how long `num_bytes` take at `mbps` million bits a second."""
    return 8 * num_bytes / (mbps * 1e6)


def encoded_bytes(shapes: Iterable[torch.Size], codec: CompressionName, *, has_parts: bool) -> int:
    """Count the bytes of float32 tensors in a codec.

    With `has_parts` they are cut into parts first, as for averaging; a download encodes each tensor whole.
    """
    part_values = PART_BYTES * 8 // _BITS[codec]
    total = 0
    for shape in shapes:
        num_values = shape.numel()
        sizes = [num_values]
        if has_parts:
            whole, rest = divmod(num_values, part_values)
            sizes = [part_values] * whole + [rest] * (rest > 0)
        total += -(-num_values * _BITS[codec] // 8) + len(sizes) * _HEADER_BYTES.get(codec, 0)
        if codec in _BLOCKS:
            block, scale_bytes = _BLOCKS[codec]
            total += sum(scale_bytes * -(-size // block) for size in sizes)
    return total
