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

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the thread that asks
            self._error = error

    @property
    def is_over(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the call raised; None if it returned, or is not over."""
        return self._error

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, but no longer; say whether it is."""
        self._thread.join(timeout_s)
        return self.is_over

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; waits for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
