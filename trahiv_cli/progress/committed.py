"""The committed state of a peer: one value, which changes together with its weights, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from trahiv_cli.errors import TrahivError
from trahiv_cli.progress.history import History
from trahiv_cli.progress.ledger import Ledger
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.progress.scores import Scores

Changes = Mapping[torch.device, torch.cuda.Event]
"""Per GPU, an event that fires when the queued writes are done. GPUs without writes are absent."""

NO_CHANGES: Changes = MappingProxyType({})


class StateLock:
    """A reentrant lock over tensors that records when the GPU writes queued under it will be done.

    The thread that made the lock continues with its next batches before these writes are done. A thread that
    copies the tensors waits for `changes`, but not for those batches.
    """

    def __init__(self) -> None:
        self._devices: frozenset[torch.device] = frozenset()
        self.changes = NO_CHANGES  # queued before the thread that made the lock last released it
        self.is_torn = False  # whether a failure has left the tensors partly changed
        self._lock = threading.RLock()
        self._maker = threading.get_ident()

    def watch(self, devices: Iterable[torch.device]) -> None:
        """Record the writes on these GPUs from now on."""
        self._devices = frozenset(devices)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        try:
            if threading.get_ident() == self._maker:
                self.changes = {one: torch.cuda.current_stream(one).record_event() for one in self._devices}
        finally:
            self._lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock while the tensors change; a `TrahivError` in the block means that they have not."""
        with self:
            self.is_torn = True
            try:
                yield
            except TrahivError:
                self.is_torn = False
                raise
            self.is_torn = False


@dataclass(frozen=True)
class Committed:
    """The facts that belong to a peer's weights."""

    history: History = History()
    """The committed steps behind the weights."""

    ledger: Ledger = Ledger()
    """The positions of the data that these steps have trained."""

    pace: Pace = DEFAULT_PACE
    """Mode, codec and local steps of the next round."""

    group: frozenset[str] = frozenset()
    """Ids of the members of the round that led here, or of the donor of a downloaded state."""

    scores: Scores = Scores()
    """The agreed scores of weights of these steps."""


class CommittedCell:
    """Holds the present `Committed` of a peer. `SwarmOptimizer` makes one, which its parts share.

    Hold `lock` while it changes together with weights and optimizer state.
    """

    def __init__(self, first: Committed) -> None:
        self.now = first
        self.lock = StateLock()

    def change(self, **changes: Any) -> None:
        """Replace fields of the present value."""
        self.now = replace(self.now, **changes)
