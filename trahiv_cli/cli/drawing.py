"""Pictures for a terminal, drawn to text first, so that they can be written and tested as one."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.bar import Bar
    from rich.console import RenderableType


def bar(part: int, whole: int, colour: str) -> Bar:
    """Make a bar that fills its column by a share; nothing but nothing is empty."""
    from rich.bar import Bar

    return Bar(whole or 1, 0, max(part, whole / 100) if part else 0, color=colour)


def draw(*things: RenderableType, width: int, is_coloured: bool) -> str:
    """Draw things below each other in `width` columns, whatever the real terminal is."""
    from rich.console import Console

    screen = io.StringIO()
    console = Console(
        file=screen,
        width=width,
        color_system="standard" if is_coloured else None,
        force_terminal=is_coloured,
        legacy_windows=False,
        _environ={},
    )
    console.print(*things)
    return screen.getvalue().rstrip("\n")
