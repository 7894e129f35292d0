"""The weights that peers in local-step modes agree on, and the outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class OuterState:
    """Weights that all peers of a history agree on (`anchor`), and the outer optimizer's momentum.

    Both are copies in float32, in host memory. The arithmetic is a sequence of float32 operations of numpy,
    each rounded as IEEE 754 prescribes, so peers with unlike processors hold the same bits. (torch may fuse a
    product and a sum on only one of them.)
    """

    def __init__(self, weights: Sequence[torch.Tensor], learning_rate: float, momentum: float) -> None:
        self.anchor = [weight.detach().to("cpu", torch.float32, copy=True) for weight in weights]
        self.momentum = [torch.zeros_like(weight) for weight in self.anchor]
        self.rounds = 0  # committed rounds, which determine the next fragment
        self._learning_rate = np.float32(learning_rate)
        self._momentum = np.float32(momentum)

    def resume(self, momentum: Sequence[torch.Tensor], rounds: int) -> None:
        """Copy a checkpoint's momentum, of the same shapes; the anchor has its weights already."""
        for own, given in zip(self.momentum, momentum, strict=True):
            own.copy_(given)
        self.rounds = rounds

    def continue_at(self, rounds: int) -> None:
        """Continue after this number of committed rounds."""
        self.rounds = rounds

    def step(self, places: range, pseudo_gradients: Sequence[torch.Tensor]) -> None:
        """Move the agreed weights at these indices by averages of `anchor` minus each peer's weights.

        Source: SGD with Nesterov momentum as in torch.optim.SGD: m = mu m + g; w = w - lr (g + mu m).
        """
        for place in places:
            gradient = pseudo_gradients[place].detach().numpy()
            anchor = self.anchor[place].numpy()
            momentum = self.momentum[place].numpy()
            momentum *= self._momentum
            momentum += gradient
            update = momentum * self._momentum
            update += gradient
            update *= self._learning_rate
            anchor -= update
        self.rounds += 1
