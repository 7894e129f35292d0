"""Chores of a node, done again and again in a thread of their own."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence

from trahiv_cli.errors import TrahivError

logger = logging.getLogger(__name__)

TURN_S = 2.0


class Turns:
    """Does chores every `TURN_S` until it is closed; what goes wrong is logged once, and tried again.

    Args:
        chores: called in this order.
    """

    def __init__(self, chores: Sequence[Callable[[], None]]) -> None:
        self._chores = dict.fromkeys(chores, "")  # with its last trouble
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chores", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """End. Safe to call twice, and before `start`."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            for chore, trouble_before in self._chores.items():
                trouble = ""
                try:
                    chore()
                except (TrahivError, concurrent.futures.CancelledError) as error:
                    trouble = f"A chore of this peer's node was not done: {error}"
                except OSError as error:
                    trouble = f"What this peer knows of others was not written down: {error}"
                if trouble and trouble != trouble_before:
                    logger.warning(trouble)
                self._chores[chore] = trouble
            if self._is_over.wait(TURN_S):
                return
