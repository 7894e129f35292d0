"""Pictures for a terminal, drawn to text first, so that they can be written and tested as one."""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def wants_colour() -> bool:
    """Whether stdout is a terminal whose user has nothing against colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def terminal_width(widest: int) -> int:
    """Return the terminal's columns, at most `widest`; 80 where there is none."""
    return min(shutil.get_terminal_size().columns, widest)


def bar(share: float, width: int) -> str:
    """Draw a share of `width` columns to an eighth of a column; nothing but nothing is empty."""
    eighths = max(round(share * width * 8), share > 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


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
