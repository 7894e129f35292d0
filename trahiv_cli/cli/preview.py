"""`trahiv preview`: samples as the model will see them, and figures over more of them."""

from __future__ import annotations

import itertools
import statistics
import sys
import unicodedata
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.drawing import bar, canvas, terminal_width, wants_colour
from trahiv_cli.cli.libraries import quiet_libraries, settle_hub
from trahiv_cli.cli.options import RecipeArgument, SetOption, read_recipe
from trahiv_cli.cli.output import Format, FormatOption, out

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from trahiv_cli.train.seen import Part, Preview, Sample

TRAINED = "bold green"
SPECIAL = "cyan"
BRACKETS = "⟦", "⟧"
"""Around trained tokens where there is no colour: seldom in a text, and readable in any font."""

NEWLINE = "↵"
JOINERS = "\u200c\u200d"
"""Invisible, and part of how scripts and emoji are written."""

BAR = 32
WIDEST = 120


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(preview)


def preview(
    recipe: RecipeArgument,
    num_shown: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Show N samples.")] = 3,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Show samples as the model sees them, trained tokens marked."""
    out.use(format, sys.stdout)
    loaded = read_recipe(recipe, overrides)
    quiet_libraries()
    warnings.simplefilter("ignore")  # libraries' advice to programmers
    if out.format is Format.human:
        out.say("preparing the data ...")
    settle_hub(loaded.recipe)
    from trahiv_cli.train.preview import build_preview

    told: list[tuple[str, str]] = []
    shown = build_preview(loaded.recipe, num_shown, lambda message, hint: told.append((message, hint)))
    if out.format is Format.json:
        out.event("preview", **shown.to_data())
    else:
        is_coloured = out.format is Format.human and wants_colour()
        out.data(picture(shown, terminal_width(WIDEST), is_coloured=is_coloured))
    for message, hint in told:
        out.warning("data", readable(message), hint)


def title(sample: Sample, number: int, preview: Preview) -> str:
    """Say what a sample is and how much of it is trained."""
    what = "row" if preview.is_packed and preview.task == "sft" else "sample"
    said = [f"{what} {number}", f"{sample.num_tokens:,} tokens"]
    if not preview.classes:
        said.append(f"{sample.num_trained:,} {'hidden' if preview.task == 'mlm' else 'trained'}")
    if sample.is_left_out:
        said.append("left out")
    return ", ".join(said)


def figures(preview: Preview) -> dict[str, str]:
    """Say in words what was counted: a few words for each name."""
    looked_at, total = preview.num_looked_at, preview.num_samples
    if total is None:
        samples = f"a stream, the first {looked_at:,} looked at"
    else:
        samples = f"{total:,}" + (f", the first {looked_at:,} looked at" if looked_at < total else "")
    rows = {"samples": samples}
    if preview.packing_efficiency is not None:
        packed = f"{preview.num_rows:,} row{'s' * (preview.num_rows > 1)} of {preview.max_length:,} tokens"
        rows["packing"] = f"{packed}, {_percent(preview.packing_efficiency)} filled"
    if not preview.classes:
        word = "hidden" if preview.task == "mlm" else "trained"
        share = f"{preview.num_trained:,} of {preview.num_tokens:,}"
        rows[word] = f"{_percent(preview.trained_share)} of the tokens ({share})"
    if preview.num_untrained:
        fate = "" if preview.is_packed else ", and are left out"
        rows["untrained"] = (
            f"{preview.num_untrained:,} of {looked_at:,} train nothing once they are cut{fate}"
        )
    if preview.lengths:
        half = f"half of them up to {statistics.median_low(preview.lengths):,}"
        rows["lengths"] = f"{min(preview.lengths):,} to {max(preview.lengths):,} tokens, {half}"
    if preview.num_cut is not None:
        rows["cut"] = f"{preview.num_cut:,} of {len(preview.lengths):,} cut at {preview.max_length:,} tokens"
        rows["cut"] += f" ({preview.setting})"
    return rows


def bars(preview: Preview) -> dict[str, dict[str, int]]:
    """Give the counts to draw: heading -> label -> count."""
    lengths = {}
    for each in preview.histogram():
        last = " and more, cut" if each.last is None else f" - {each.last:,}" * (each.first < each.last)
        lengths[f"{each.first:,}{last}"] = each.count
    classes = {readable(name): count for name, count in preview.classes.items()}
    found = {f"tokens in a {preview.length_of}": lengths, "classes": classes}
    return {heading: counts for heading, counts in found.items() if counts}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def readable(text: str) -> str:
    """Make what can't be seen visible, and keep it from steering the terminal."""

    def shown(char: str) -> str:
        if char in "\n\t":
            return f"{NEWLINE}\n" if char == "\n" else "⇥   "
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in JOINERS:
            return char.encode("unicode_escape").decode("ascii")
        return char

    return "".join(map(shown, text))


def bracketed(part: Part) -> str:
    """Write a part with its trained tokens in brackets."""
    text = ""
    for is_trained, run in itertools.groupby(part.pieces, key=lambda piece: piece.is_trained):
        said = readable("".join(piece.text for piece in run))
        lines = said.removesuffix("\n")
        text += f"{BRACKETS[0]}{lines}{BRACKETS[1]}{said[len(lines) :]}" if is_trained else said
    return text.removesuffix("\n")


def picture(preview: Preview, width: int, *, is_coloured: bool) -> str:
    """Draw a preview in `width` columns; without colour, trained tokens are in brackets."""
    from rich.console import Group
    from rich.panel import Panel

    console, screen = canvas(width, is_coloured=is_coloured)
    for number, sample in enumerate(preview.samples, 1):
        said = title(sample, number, preview)
        console.print(Panel(Group(*_drawn(sample, is_coloured)), title=said, title_align="left"))
    name = f"[bold]{preview.name}[/] ({preview.task})"
    console.print(Panel(_summary(preview, is_coloured), title=name, title_align="left", border_style="cyan"))
    return screen.getvalue().rstrip("\n")


def _drawn(sample: Sample, is_coloured: bool) -> list[RenderableType]:
    from rich.rule import Rule
    from rich.text import Text

    drawn: list[RenderableType] = []
    for part in sample.parts:
        if part.name:
            drawn.append(Rule(Text(part.name, style="dim"), align="left", style="dim"))
        drawn.append(_coloured(part) if is_coloured else Text(bracketed(part), overflow="fold"))
    if sample.num_cut:
        cut = Text(f"{sample.num_cut:,} more tokens, cut off", style="yellow")
        drawn.append(Rule(cut, align="left", style="yellow"))
    return drawn


def _coloured(part: Part) -> Text:
    from rich.text import Text

    text = Text(overflow="fold")
    for piece in part.pieces:
        style = TRAINED if piece.is_trained else SPECIAL if piece.is_special else ""
        text.append(readable(piece.text), style)
    if text.plain.endswith("\n"):
        text.right_crop()
    text.highlight_regex(NEWLINE, "dim")
    return text


def _summary(preview: Preview, is_coloured: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    words = Table.grid(padding=(0, 2))
    for name, said in figures(preview).items():
        value = Text(said)
        if name in ("trained", "hidden"):
            like_this = ("like this", TRAINED) if is_coloured else ("like this".join(BRACKETS), "")
            value.append(", ").append(*like_this)
        words.add_row(Text(name, style="dim"), value)
    drawn: list[RenderableType] = [words]
    for heading, counts in bars(preview).items():
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right")
        grid.add_column(justify="right")
        most = max(counts.values()) or 1
        for label, count in counts.items():
            style = "yellow" if label.endswith("cut") else "cyan"
            length = Text(bar(count / most, BAR), style=style, no_wrap=True, overflow="crop")
            grid.add_row(Text(label), f"{count:,}", length)
        drawn += [Text(), Text(heading, style="dim"), grid]
    return Group(*drawn)
