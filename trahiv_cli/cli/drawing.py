"""Pictures for a terminal, drawn to text first, so that they can be written and tested as one."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def wants_colour() -> bool:
    """Whether stdout is a terminal whose user has nothing against colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def canvas(width: int, *, is_coloured: bool) -> tuple[Console, io.StringIO]:
    """Return a console of `width` columns, whatever the real terminal is, and what is drawn on it."""
    from rich.console import Console

    drawn = io.StringIO()
    console = Console(
        file=drawn,
        width=width,
        color_system="standard" if is_coloured else None,
        force_terminal=is_coloured,
        legacy_windows=False,
        _environ={},
    )
    return console, drawn
