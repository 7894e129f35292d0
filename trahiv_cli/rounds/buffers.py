"""Buffers of a model that training moves, such as BatchNorm's running statistics: they are part of its state.

Forward passes move them, so peers hold different ones between two rounds. A round averages them beside the
weights or gradients, each peer's with its claimed weight, and its members agree on the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trahiv_cli.rounds.codecs import FLOATS

LARGEST_STATISTIC = 1e15  # with any weight it fits into float32; a greater value belongs to a mask


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are saved with a model, by name, except buffers of quantized layers.

    These belong to the storage format of a weight: such a layer has a weight in integers or in 8 bits.
    """
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not _is_quantized(module)
    }


def moving_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers that training may move, by name: finite floats, and single counts."""
    return {
        name: buffer
        for name, buffer in persistent_buffers(model).items()
        if buffer.dtype in (*FLOATS, *([] if buffer.dim() else [torch.int64])) and are_usable(buffer)
    }


def are_usable(values: torch.Tensor) -> bool:
    """Whether all values can belong to a statistic: finite, and no larger than `LARGEST_STATISTIC`."""
    return bool((values.abs() <= LARGEST_STATISTIC).all())


def _is_quantized(module: torch.nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    plain = (*FLOATS, torch.int64, torch.bool)  # the latter two are for tables and masks
    return any(tensor.dim() > 1 and tensor.dtype not in plain for tensor in own)


class Buffers:
    """The moving buffers of one peer's model, and the values that all peers of its history agree on.

    `SwarmOptimizer` creates one. Vectors hold the values of all buffers in order, as float32 in host memory.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._model = model or torch.nn.Module()
        self._names = list(moving_buffers(self._model))
        self._agreed = torch.zeros(sum(buffer.numel() for buffer in self.live.values()))
        self._agreed.copy_(self._own())
        self._aside = self._agreed.clone()
        self.common = [self._agreed] if self._names else []
        """The agreed vector, equal for all peers of a history; empty if the model has no such buffers."""
        self.exchanged = [
            vector.clone().share_memory_()  # type: ignore[no-untyped-call]
            for vector in self.common
        ]
        """The vector that a round averages, in shared memory; empty if the model has no such buffers."""

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """The model's own buffers, by name; read each time, because a module may replace a tensor."""
        return {name: self._model.get_buffer(name) for name in self._names}

    @property
    def agreed(self) -> dict[torch.Tensor, torch.Tensor]:
        """The agreed values of each buffer, by the model's own tensor: float32 views of the same shape."""
        return dict(self._pairs(self._agreed))

    @property
    def have_moved(self) -> bool:
        """Whether the buffers that were set aside differ from the agreed ones."""
        return not torch.equal(self._aside, self._agreed)

    def set_aside(self) -> None:
        """Copy this peer's buffers to `exchanged`, which a failed round leaves unchanged."""
        self._aside.copy_(self._own())
        for vector in self.exchanged:
            vector.copy_(self._aside)

    def apply(self, *, keeps_own: bool) -> None:
        """Agree on the average in `exchanged`, and put it into the model.

        With `keeps_own`, the model's buffers also keep this peer's changes since they were set aside. In
        modes in which training goes on during a round, they would otherwise stand still.
        """
        own = self._own()
        moved = own - self._aside
        for average in self.exchanged:
            self._put(average)
        self._agreed.copy_(self._aside)
        if keeps_own:  # but no lower than both, or a variance might become negative
            self._put(torch.maximum(self._agreed + moved, torch.minimum(self._agreed, own)))

    def restore(self) -> None:
        """Put the agreed buffers into the model."""
        self._put(self._agreed)

    def _pairs(self, vector: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the model's buffers, each with its part of a vector."""
        start = 0
        for buffer in self.live.values():
            yield buffer, vector[start : start + buffer.numel()].view(buffer.shape)
            start += buffer.numel()

    @torch.no_grad()
    def _put(self, vector: torch.Tensor) -> None:
        """Put values into the model, and set them aside as it stores them."""
        for buffer, part in self._pairs(vector):
            buffer.copy_(part)
        self.set_aside()

    def _own(self) -> torch.Tensor:
        """Copy the model's buffers, with the agreed values in place of values that are not usable."""
        vector = torch.empty_like(self._agreed)
        for buffer, part in self._pairs(vector):
            part.copy_(buffer.detach())
        return torch.where(vector.abs() <= LARGEST_STATISTIC, vector, self._agreed)
