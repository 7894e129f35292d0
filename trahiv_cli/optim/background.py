"""Work that is done beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a thread of its own, which does not keep the process from ending.

    Args:
        work: is called at once.
    """

    error: BaseException | None = None  # what the call raised; None if it returned, or is not over

    def __init__(self, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._thread = threading.Thread(target=self._run, args=[work], daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the thread that asks
            self.error = error

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, but no longer; say whether it is."""
        self._thread.join(timeout_s)
        return self.is_over

    def result(self) -> T:
        """Wait for what the call returned, or raise what it raised."""
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self._results[0]
