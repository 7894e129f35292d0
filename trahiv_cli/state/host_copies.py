"""Copies of tensors in host memory, made while the device continues to compute."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from trahiv_cli.progress.committed import NO_CHANGES, Changes


class HostCopies:
    """Host memory for copies of such tensors, on any device; a GPU fills it in parallel with other work.

    A copy from a GPU goes through pinned memory and a stream of its own, behind the work that the GPU had
    queued when it began; the training thread does not wait for it. If `memory` is given, the copies go there
    instead.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], memory: Sequence[torch.Tensor] | None = None) -> None:
        self._copies = memory or [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors
        ]
        self._events: list[torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def begin(self, tensors: Sequence[torch.Tensor], after: Changes = NO_CHANGES) -> None:
        """Start to copy the current values of tensors like the ones given at the start.

        Afterwards the caller may change tensors in host memory, and GPU tensors by kernels that it queues on
        the current stream; GPU tensors must not be freed before `wait`. On a GPU in `after`, the copy waits
        for that event alone, and the caller must keep the tensors unchanged until `wait` returns.
        """
        self._events.clear()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            if device in after:
                stream.wait_event(after[device])
            else:
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy, tensor in zip(self._copies, tensors, strict=True):
                    if tensor.device == device:
                        copy.copy_(tensor.detach(), non_blocking=True)
                # A blocking event: `wait` sleeps; otherwise torch would poll the GPU.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
            if device not in after:
                # The next changes of these tensors must wait for the copy: on the GPU, not in this thread.
                torch.cuda.current_stream(device).wait_event(event)
            self._events.append(event)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            if not tensor.is_cuda:
                source = tensor.detach().contiguous()
                # Not `copy_`: in a thread other than the training thread it would start OpenMP threads, see
                # `step/method.py`.
                ctypes.memmove(copy.data_ptr(), source.data_ptr(), source.nbytes)

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait until the copies are complete, and return them; the next `begin` overwrites them."""
        for event in self._events:
            event.synchronize()
        return self._copies


def host_values(tensors: Sequence[torch.Tensor], after: Changes, room: int = 2**26) -> Iterator[torch.Tensor]:
    """Yield the values of tensors, on any device, in host memory: each detached and contiguous.

    If all tensors are in host memory, it yields the tensors themselves. Otherwise the values pass through one
    pinned buffer of `room` bytes, or of one tensor's size if larger, and each may be overwritten when the
    caller takes the next one; torch keeps that memory. For `after` see `HostCopies.begin`.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        yield from (tensor.detach().contiguous() for tensor in tensors)
        return
    room = max(room, *(tensor.nbytes for tensor in tensors))
    buffer = torch.empty(room, dtype=torch.uint8, pin_memory=True)
    waiting = deque(tensors)
    while waiting:
        batch = list[torch.Tensor]()
        memory = list[torch.Tensor]()
        start = 0
        while waiting and start + waiting[0].nbytes <= room:
            tensor = waiting.popleft()
            batch.append(tensor)
            memory.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += aligned(tensor.nbytes)
        copies = HostCopies(batch, memory)
        copies.begin(batch, after)
        yield from copies.wait()


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of `num_bytes` takes in a buffer of several tensors."""
    return -(-num_bytes // 16) * 16  # no dtype needs another alignment
