"""Files that a run writes to for as long as it lasts, within a bound: the oldest lines go."""

from __future__ import annotations

import contextlib
import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 32 * 2**20
"""Of one file. Events of two peers' steps take 0.7 kB each: 45,000 of them."""

OLDER_FILES = 3
"""So many that were full are kept beside the present one, as `<name>.1`, the newest, to `<name>.3`."""


class RotatingFile(RotatingFileHandler):
    """`RotatingFileHandler` of a file in which all processes of a peer write, each with its own copy of this.

    One that finds the file renamed by another goes on in the new one. Two that rename it in the same moment
    leave one that is short.

    Args:
        path: its folder must exist; what it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True)

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - its name is logging's
        """Tell whether the record does not fit into the file that is there now."""
        if self.stream is not None:
            is_renamed = True
            with contextlib.suppress(FileNotFoundError):
                is_renamed = not os.path.samestat(os.fstat(self.stream.fileno()), os.stat(self.baseFilename))
            if is_renamed:
                self.stream.close()
                self.stream = None
        return bool(super().shouldRollover(record))
