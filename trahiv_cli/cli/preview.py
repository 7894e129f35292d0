"""`trahiv preview`: samples as the model will see them, and figures over more of them."""

from __future__ import annotations

import io
import itertools
import shutil
import statistics
import sys
import unicodedata
import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.libraries import quiet_libraries
from trahiv_cli.cli.options import RECIPE, SetOption, read_recipe
from trahiv_cli.cli.output import Format, FormatOption, out

if TYPE_CHECKING:
    from rich.bar import Bar
    from rich.console import RenderableType
    from rich.text import Text

    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.train.preview import Part, Preview, Sample

TRAINED = "bold green"
SPECIAL = "cyan"
BRACKETS = "⟦", "⟧"
"""Around trained tokens where there is no colour: seldom in a text, and readable in any font."""

NEWLINE = "↵"
JOINERS = "\u200c\u200d"
"""Invisible, and part of how scripts and emoji are written."""

BAR = 32
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
        out.event("preview", **shown.to_data())
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        out.data(picture(shown, width, is_coloured=out.has_colour(sys.stdout)))
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

    told: list[tuple[str, str]] = []
    return build_preview(recipe, num_shown, lambda message, hint: told.append((message, hint))), told


def picture(preview: Preview, width: int, *, is_coloured: bool) -> str:
    """Draw a preview in `width` columns; without colour, trained tokens are in brackets."""
    from rich.console import Group
    from rich.panel import Panel

    things = [
        (title(sample, number, preview), drawn(sample, is_coloured), "none")
        for number, sample in enumerate(preview.samples, 1)
    ]
    things.append((f"[bold]{preview.name}[/] ({preview.task})", summary(preview, is_coloured), "cyan"))
    panels = [
        Panel(Group(*inside), title=said, title_align="left", border_style=colour)
        for said, inside, colour in things
    ]
    return draw(*panels, width=width, is_coloured=is_coloured)


def title(sample: Sample, number: int, preview: Preview) -> str:
    """Say what a sample is and how much of it is trained."""
    what = "row" if preview.is_packed and preview.task == "sft" else "sample"
    said = [f"{what} {number}", f"{sample.num_tokens:,} tokens"]
    if not preview.classes:
        said.append(f"{sample.num_trained:,} {'hidden' if preview.task == 'mlm' else 'trained'}")
    return ", ".join([*said, *["left out"] * sample.is_left_out])


def drawn(sample: Sample, is_coloured: bool) -> list[RenderableType]:
    """Draw a sample's parts, each below its name, and how much was cut off."""
    from rich.rule import Rule
    from rich.text import Text

    things: list[RenderableType] = []
    for part in sample.parts:
        if part.name:
            things.append(Rule(Text(part.name, style="dim"), align="left", style="dim"))
        things.append(text_of(part, is_coloured))
    if sample.num_cut:
        cut = Text(f"{sample.num_cut:,} more tokens, cut off", style="yellow")
        things.append(Rule(cut, align="left", style="yellow"))
    return things


def text_of(part: Part, is_coloured: bool) -> Text:
    """Write a part with its trained tokens in colour, or in brackets where there is none."""
    from rich.text import Text

    text = Text(overflow="fold")
    for is_trained, run in itertools.groupby(part.pieces, key=lambda piece: piece.is_trained):
        if is_coloured:
            for piece in run:
                text.append(readable(piece.text), TRAINED if is_trained else SPECIAL * piece.is_special)
            continue
        said = readable("".join(piece.text for piece in run))
        lines = said.removesuffix("\n")
        text.append(f"{lines.join(BRACKETS)}{said[len(lines) :]}" if is_trained else said)
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


def figures(preview: Preview) -> dict[str, str]:
    """Say in words what was counted: a few words for each name."""
    looked_at, total = preview.num_looked_at, preview.num_samples
    seen = f", the first {looked_at:,} looked at" if total is None or looked_at < total else ""
    rows = {"samples": (f"{total:,}" if total is not None else "a stream") + seen}
    if preview.packing_efficiency is not None:
        packed = f"{preview.num_rows:,} row{'s' * (preview.num_rows > 1)} of {preview.max_length:,} tokens"
        rows["packing"] = f"{packed}, {100 * preview.packing_efficiency:.1f} % filled"
    if not preview.classes:
        share = f"{100 * preview.trained_share:.1f} % of the tokens"
        word = "hidden" if preview.task == "mlm" else "trained"
        rows[word] = f"{share} ({preview.num_trained:,} of {preview.num_tokens:,})"
    if preview.num_untrained:
        few = f"{preview.num_untrained:,} of {looked_at:,} train nothing once they are cut"
        rows["untrained"] = few if preview.is_packed else f"{few}, and are left out"
    if preview.lengths:
        half = f"half of them up to {statistics.median_low(preview.lengths):,}"
        rows["lengths"] = f"{min(preview.lengths):,} to {max(preview.lengths):,} tokens, {half}"
    if preview.num_cut is not None:
        cut = f"{preview.num_cut:,} of {len(preview.lengths):,} cut at {preview.max_length:,} tokens"
        rows["cut"] = f"{cut} ({preview.setting})"
    return rows


def summary(preview: Preview, is_coloured: bool) -> list[RenderableType]:
    """Draw the figures, and how lengths and classes are spread."""
    from rich.table import Column, Table
    from rich.text import Text

    words = Table.grid(padding=(0, 2))
    for name, said in figures(preview).items():
        value = Text(said)
        if name in ("trained", "hidden"):
            like_this = ("like this", TRAINED) if is_coloured else ("like this".join(BRACKETS), "")
            value.append(", ").append(*like_this)
        words.add_row(Text(name, style="dim"), value)
    lengths = {}
    for each in preview.histogram():
        last = " and more, cut" if each.last is None else f" - {each.last:,}" * (each.first < each.last)
        lengths[f"{each.first:,}{last}"] = each.count
    classes = {readable(name): count for name, count in preview.classes.items()}
    things: list[RenderableType] = [words]
    for heading, counts in ((f"tokens in a {preview.length_of}", lengths), ("classes", classes)):
        if not counts:
            continue
        right, bars = Column(justify="right"), Column(max_width=BAR)
        grid = Table.grid(right, right.copy(), bars, padding=(0, 2))
        for label, count in counts.items():
            colour = "yellow" if label.endswith("cut") else "cyan"
            grid.add_row(Text(label), f"{count:,}", bar(count, max(counts.values()), colour))
        things += [Text(), Text(heading, style="dim"), grid]
    return things


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
