"""`trahiv preview`: samples as the model will see them, and figures over more of them."""

from __future__ import annotations

import io
import itertools
import shutil
import sys
import unicodedata
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.options import RECIPE, SetOption, read_recipe
from trahiv_cli.cli.output import Format, FormatOption, out, quiet_libraries

if TYPE_CHECKING:
    from rich.bar import Bar
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.train.preview import Part, Preview

TRAINED = "bold green"
SPECIAL = "cyan"
BRACKETS = "⟦", "⟧"
"""Around trained tokens: seldom in a text, and readable in any font."""

NEWLINE = "↵"
JOINERS = "\u200c\u200d"
"""Invisible, and part of how scripts and emoji are written."""

WIDEST = 120


def preview(
    recipe: Annotated[str, RECIPE],
    num_shown: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Show N samples.")] = 3,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Show samples as the model sees them, trained tokens marked."""
    out.use(format, sys.stdout)
    loaded = read_recipe(recipe, overrides)
    quiet_libraries()
    shown, told = look(loaded.recipe, num_shown, "preparing the data ...")
    if out.format is Format.json:
        out.event("preview", **asdict(shown))
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        out.data(draw(*picture(shown), width=width, is_coloured=out.has_colour(sys.stdout)))
    for message, hint in told:
        out.warning("data", readable(message), hint)


def look(recipe: Recipe, num_shown: int, words: str) -> tuple[Preview, list[tuple[str, str]]]:
    """Prepare the first samples as training would, while `words` tell a person to wait."""
    warnings.simplefilter("ignore")  # libraries' advice to programmers
    if out.format is Format.human:
        out.say(words)
    from trahiv_cli.assets.hub import HINT, do_without_hub

    if said := do_without_hub(recipe):
        out.warning("hub", said, HINT)
    from trahiv_cli.train.preview import build_preview

    return build_preview(recipe, num_shown)


def picture(preview: Preview) -> list[RenderableType]:
    """Draw the samples, each part below its name, and the figures."""
    from rich.rule import Rule
    from rich.text import Text

    things: list[RenderableType] = []
    for number, sample in enumerate(preview.samples, 1):
        title = f"{'row' if preview.packed else 'sample'} {number}, {sample.tokens:,} tokens"
        if not preview.classes:
            title += f", {sample.trained_tokens:,} {trained_word(preview)}"
        things.append(Rule(title, align="left", style="", characters="━"))
        for part in sample.parts:
            if part.name:
                things.append(Rule(Text(part.name, style="dim"), align="left", style="dim"))
            things.append(text_of(part))
    title = f"[bold]{preview.name}[/] ({preview.task})"
    return [*things, Rule(title, align="left", style="cyan", characters="━"), summary(preview)]


def trained_word(preview: Preview) -> str:
    """Say what is done with the tokens that are to be learned."""
    return "hidden" if preview.task == "mlm" else "trained"


def text_of(part: Part) -> Text:
    """Write a part with its trained tokens in brackets, and in colour where there is any."""
    from rich.text import Text

    text = Text(overflow="fold")
    for is_trained, run in itertools.groupby(part.pieces, key=lambda piece: piece.trained):
        opening, closing = BRACKETS if is_trained else ("", "")
        text.append(opening)
        for piece in run:
            text.append(readable(piece.text), TRAINED if is_trained else SPECIAL * piece.special)
        text.append(closing)
    if text.plain.endswith("\n"):
        text.right_crop()
    text.highlight_regex(NEWLINE, "dim")
    return text


def readable(text: str) -> str:
    """Make what can't be seen visible, and keep it from steering the terminal."""

    def shown(char: str) -> str:
        is_invisible = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in JOINERS
        return char.encode("unicode_escape").decode("ascii") if is_invisible else char

    steers = {"\n": f"{NEWLINE}\n", "\t": "⇥   "}
    return "".join(steers.get(char) or shown(char) for char in text)


def summary(preview: Preview) -> Table:
    """Say in a table what was counted: a few words for each name."""
    from rich.table import Table
    from rich.text import Text

    from trahiv_cli.recipe.schema import section_of

    looked_at, total, lengths = preview.looked_at, preview.num_samples, preview.lengths
    seen = f", the first {looked_at:,} looked at" if total is None or looked_at < total else ""
    rows = {"samples": Text((f"{total:,}" if total is not None else "a stream") + seen)}
    if preview.packed:
        rows["packed"] = Text(f"into rows of at most {preview.max_length:,} tokens: {preview.rows:,}")
    elif preview.rows < looked_at:
        rows["left out"] = Text(f"{looked_at - preview.rows:,} that would train nothing once they are cut")
    if preview.trained_tokens is not None:
        share = 100 * preview.trained_tokens / max(preview.tokens, 1)
        said = f"{share:.1f} % of the tokens ({preview.trained_tokens:,} of {preview.tokens:,}), "
        rows[trained_word(preview)] = Text.assemble(said, ("like this".join(BRACKETS), TRAINED))
    if lengths:
        half = f"half of them up to {lengths['median']:,}"
        rows["lengths"] = Text(f"{lengths['shortest']:,} to {lengths['longest']:,} tokens, {half}")
        limit = f"{preview.max_length:,} tokens ({section_of(preview.task)}.max_length)"
        rows["full"] = Text(f"{preview.full_samples:,} have {limit}, and longer ones are cut")
    if preview.classes:
        rows["classes"] = Text(", ".join(f"{readable(name)} {n:,}" for name, n in preview.classes.items()))
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), value)
    return table


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
