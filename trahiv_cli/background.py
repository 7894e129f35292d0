"""Background threads for work beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Call `work` in a new daemon thread, and return the future of its result.

    Unlike a thread of an executor, it doesn't keep the process from ending.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def every(seconds: float, act: Callable[[], None], name: str) -> Iterator[None]:
    """While the block runs, call `act` every `seconds` in a thread of its own."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
