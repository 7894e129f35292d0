"""How many bytes of encoded tensors a run sends and receives, by its codecs and its pace.

The transport's framing and what peers tell each other besides are about one part in a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trahiv_cli.assets.memory import FLOAT32_BYTES, STATES, Estimate
from trahiv_cli.optim.auto import CODECS_BY_LOSS
from trahiv_cli.optim.pace import Pace
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.swarm.codecs import CODECS

SPEEDS_MBPS = (5, 20, 100, 1000)
"""Uplinks, in megabits a second: mobile, home, office, data centre."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that pass between this peer and the others."""

    gradient_bytes: int  # one encoded copy of what is exchanged; in mode auto, in the longest of its codecs
    state_bytes: int  # a joiner downloads: weights, optimizer state, and with local steps outer momentum
    steps_per_round: int = 1
    num_fragments: int = 1  # exchanges until each weight was in one
    by_choice: dict[str, int] = field(default_factory=dict)
    """In mode auto, one copy in each of its codecs, and of a fragment in the shortest; else empty."""

    def sent_in_round(self, num_peers: int) -> int:
        """Count the bytes that a peer sends, and receives, in a round; of fragments, an average one's."""
        return sent(self.gradient_bytes / self.num_fragments, num_peers)

    def sent_by_choice(self, num_peers: int) -> dict[str, int]:
        """Count the bytes that a peer sends, and receives, in a round, by what mode auto may choose."""
        return {choice: sent(num_bytes, num_peers) for choice, num_bytes in self.by_choice.items()}


def sent(num_bytes: float, num_peers: int) -> int:
    """Count what a peer sends to average one copy of `num_bytes`; twice that is the limit.

    Each peer reduces a share of its own: it sends the rest of its copy, and then the average of its share.
    """
    return round(2 * num_bytes * (num_peers - 1) / num_peers)


def seconds(num_bytes: int, mbps: float) -> float:
    """Say how long `num_bytes` take at `mbps` million bits a second."""
    return 8 * num_bytes / (mbps * 1e6)


def traffic_of(recipe: Recipe, needed: Estimate) -> Traffic:
    """Add up what the recipe's mode and codecs make of the trained weights."""
    opt, swarm, values = recipe.hivemind_config.opt, recipe.swarm, needed.trained_values
    is_auto, one_copy = swarm.mode == "auto", needed.trainable_bytes
    pace = Pace("sync" if swarm.mode == "auto" else swarm.mode, None, swarm.local_steps, swarm.fragments)
    named = opt.grad_compression or "none"
    codecs = CODECS_BY_LOSS if is_auto and opt.grad_compression is None else (named,)
    copies = {codec: encoded_bytes(values, codec, has_parts=True) for codec in codecs}
    by_choice = {**copies, "a fragment": min(copies.values()) // swarm.fragments} if is_auto else {}
    statistics = needed.optimizer_bytes
    if pace.has_local_steps and STATES.get(recipe.training.optim, (0, 32))[1] == 32 and one_copy:
        # They go to a joiner in 8 bits a value (`codecs.EightBitStatistics`), about as long as in this codec.
        statistics = statistics * encoded_bytes(values, "blockwise8", has_parts=False) // one_copy
    state = encoded_bytes(values, opt.load_state_compression, has_parts=False) + statistics
    return Traffic(
        gradient_bytes=copies[codecs[0]],
        state_bytes=state + one_copy * swarm.may_step_locally,
        steps_per_round=pace.steps_per_round,
        num_fragments=pace.num_fragments,
        by_choice=by_choice,
    )


def encoded_bytes(values: tuple[int, ...], name: str, *, has_parts: bool) -> int:
    """Count the bytes of float32 tensors of so many `values` each in a codec.

    With `has_parts` they are cut into hivemind's parts, as for averaging; a download encodes each whole.
    """
    import torch
    from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
    from hivemind.compression import CompressionInfo

    codec, part = CODECS[name](), max((1, *values))
    if has_parts:
        ratio = codec.estimate_compression_ratio(CompressionInfo.from_tensor(torch.zeros(1)))
        part = int(DEFAULT_PART_SIZE_BYTES / (FLOAT32_BYTES * ratio))
    return sum(
        number // part * codec.encoded_bytes(part, torch.float32)
        + codec.encoded_bytes(number % part, torch.float32)
        for number in values
    )
