"""Copies of tensors in host memory, made while the device goes on computing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class HostCopies:
    """Host memory for tensors that are elsewhere; a GPU writes it beside its other work.

    A copy from a GPU goes through pinned memory and a stream of its own, behind what had been asked of the
    GPU when it began; the thread that trains does not wait for it.

    Args:
        tensors: those that will be copied, of any device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [_memory_for(tensor) for tensor in tensors]
        self._events: list[torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the present values of tensors like those that were announced.

        On return, tensors in host memory may change; so may those of a GPU, by kernels that are queued on the
        current stream from now on, as long as their memory is not freed before `wait`.
        """
        self._events.clear()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy, tensor in zip(self._copies, tensors, strict=True):
                    if tensor.device == device:
                        copy.copy_(tensor.detach(), non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            # What changes these tensors next has to wait for the copy; on the GPU, not in this thread.
            torch.cuda.current_stream(device).wait_event(event)
            self._events.append(event)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if not tensor.is_cuda:
                source = tensor.detach().contiguous()
                # Not `copy_`: in a thread of its own it would start OpenMP threads, see `SwarmOptimizer`.
                ctypes.memmove(copy.data_ptr(), source.data_ptr(), source.nbytes)

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait until the copies are there; the tensors are overwritten by the next `begin`."""
        for event in self._events:
            event.synchronize()
        return self._copies


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
