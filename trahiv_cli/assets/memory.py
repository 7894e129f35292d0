"""How much memory a peer's weights, gradients and optimizer need: arithmetic, nothing is loaded.

Covered: everything that is proportional to the number of weights. Not covered: activations, which grow
with the batch, and temporary buffers; a run that barely fits here may still run out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trahiv_cli.recipe.schema import OptimName, TrainingSection

GIB = 2**30

FLOAT32_BYTES = 4

_STATES_PER_WEIGHT: dict[OptimName, int] = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
    "adafactor": 0,  # one row and one column per matrix
}
"""float32 numbers that an optimizer keeps for each weight."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose.

    Where the model is on a GPU, `device_bytes` is the GPU's share; on a CPU peer both shares come out of
    the same memory.
    """

    num_frozen: int
    num_trainable: int

    frozen_bytes: int
    """Weights that are not trained, in their own dtype."""

    trainable_bytes: int
    """Trained weights, float32."""

    gradient_bytes: int
    """Gradients of one backward pass."""

    accumulator_bytes: int
    """hivemind's sum of this peer's gradients since the last step, on the model's device."""

    averaged_bytes: int
    """The gradients as they are exchanged with peers, on the host."""

    offloaded_bytes: int
    """hivemind's copy of the trained weights, which is stepped and sent to newcomers, on the host."""

    optimizer_bytes: int
    """Optimizer state, on the host."""

    @property
    def device_bytes(self) -> int:
        """What must fit where the model runs."""
        return self.frozen_bytes + self.trainable_bytes + self.gradient_bytes + self.accumulator_bytes

    @property
    def host_bytes(self) -> int:
        """What must fit into RAM beside it."""
        return self.averaged_bytes + self.offloaded_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """What a CPU peer needs."""
        return self.device_bytes + self.host_bytes


def estimate_memory(model: torch.nn.Module, training: TrainingSection) -> MemoryEstimate:
    """Add up what training `model` takes.

    Args:
        model: any module, best on the meta device; weights with `requires_grad` are the trained ones.
        training: names the optimizer.

    Returns:
        The estimate, for hivemind 1.1.12 with an offloaded optimizer and gradient buffers of its own.
    """
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    num_trainable = sum(weight.numel() for weight in trainable)
    one_copy = FLOAT32_BYTES * num_trainable
    return MemoryEstimate(
        num_frozen=sum(weight.numel() for weight in frozen),
        num_trainable=num_trainable,
        frozen_bytes=sum(weight.numel() * weight.element_size() for weight in frozen),
        trainable_bytes=one_copy,
        gradient_bytes=one_copy,
        accumulator_bytes=one_copy,
        averaged_bytes=one_copy,
        offloaded_bytes=one_copy,
        optimizer_bytes=one_copy * _states_per_weight(training),
    )


def _states_per_weight(training: TrainingSection) -> int:
    momentum = training.optim in ("sgd", "rmsprop") and "momentum" in (training.optim_args or "")
    return _STATES_PER_WEIGHT[training.optim] + momentum
