"""The outer optimizer of modes with local steps, and what the swarm agrees on between two rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class OuterState:
    """Weights that all peers of a history agree on (`anchor`), and the outer optimizer's momentum.

    Both are copies in float32, in host memory. The arithmetic is one float32 operation of numpy after the
    other, each rounded as IEEE 754 says: peers with unlike processors hold the same bits. (torch may fuse a
    product and a sum on one of them alone.)
    """

    def __init__(self, weights: Sequence[torch.Tensor], learning_rate: float, momentum: float) -> None:
        self.anchor = [weight.detach().to("cpu", torch.float32, copy=True) for weight in weights]
        self.momentum = [torch.zeros_like(weight) for weight in self.anchor]
        self.rounds = 0  # rounds committed; it tells which fragment is next
        self._learning_rate, self._momentum = np.float32(learning_rate), np.float32(momentum)

    def load(self, weights: Sequence[torch.Tensor], momentum: Sequence[torch.Tensor], rounds: int) -> None:
        """Adopt another state: tensors of the same shapes, of any device, copied."""
        for own, given in zip((*self.anchor, *self.momentum), (*weights, *momentum), strict=True):
            own.copy_(given.detach())
        self.rounds = rounds

    def step(self, places: range, pseudo_gradients: Sequence[torch.Tensor]) -> None:
        """Move the agreed weights at these indices by averages of `anchor` minus each peer's weights.

        Source: SGD with Nesterov momentum as torch.optim.SGD has it: m = mu m + g; w = w - lr (g + mu m).
        """
        for place in places:
            # Flat: of arrays without dimensions numpy makes numbers, which can't be written to.
            gradient = pseudo_gradients[place].detach().view(-1).numpy()
            anchor, momentum = (held[place].view(-1).numpy() for held in (self.anchor, self.momentum))
            np.multiply(momentum, self._momentum, out=momentum)
            np.add(momentum, gradient, out=momentum)
            update = np.multiply(momentum, self._momentum)
            np.add(update, gradient, out=update)
            np.multiply(update, self._learning_rate, out=update)
            np.subtract(anchor, update, out=anchor)
        self.rounds += 1
