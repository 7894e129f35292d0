"""`trahiv preview`: samples as the model will see them, and statistics over more of them."""

from __future__ import annotations

import itertools
import sys
import unicodedata
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trahiv_cli.cli.options import RECIPE, SetOption
from trahiv_cli.cli.output import Format, FormatOption, out

if TYPE_CHECKING:
    from trahiv_cli.recipe.schema import Recipe
    from trahiv_cli.train.preview import Part, Preview


def preview(
    recipe: Annotated[str, RECIPE],
    num_shown: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Show N samples.")] = 3,
    overrides: SetOption = None,
    format: FormatOption = None,
) -> None:
    """Show samples as the model sees them, trained tokens marked."""
    out.use(format, sys.stdout)
    from trahiv_cli.recipe.examine import require_sound
    from trahiv_cli.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    require_sound(loaded.recipe, loaded.document)
    shown, told = look(loaded.recipe, num_shown, "preparing the data ...")
    if out.format is Format.json:
        out.event("preview", **asdict(shown))
    else:
        out.data(picture(shown))
    for message, hint in told:
        out.warning("data", readable(message), hint)


def look(recipe: Recipe, num_shown: int, words: str) -> tuple[Preview, list[tuple[str, str]]]:
    """Prepare the first samples as training would, after showing `words` to a person.

    Returns the preview, and warnings, each a message and a hint.
    """
    warnings.simplefilter("ignore")  # libraries' advice to programmers
    if out.format is Format.human:
        out.say(words)
    from trahiv_cli.assets.hub import HINT, do_without_hub

    if said := do_without_hub(recipe):
        out.warning("hub", said, HINT)
    from trahiv_cli.train.preview import build_preview

    return build_preview(recipe, num_shown)


def picture(preview: Preview) -> str:
    """Format the samples, each part below its name, and the figures, with rules between them."""
    from trahiv_cli.recipe.task_sections import SCORING_TASKS

    lines = []
    for number, sample in enumerate(preview.samples, 1):
        title = f"{'row' if preview.packed else 'sample'} {number}, {sample.tokens:,} tokens"
        if preview.task not in SCORING_TASKS:
            title += f", {sample.trained_tokens:,} {trained_word(preview)}"
        lines.append(rule(title, "━"))
        for part in sample.parts:
            if part.name:
                earned = "" if part.reward is None else f", reward {part.reward:g}"
                lines.append(rule(part.name + earned, "─"))
            lines.append(text_of(part))
    lines.append(rule(f"{preview.name} ({preview.task})", "━"))
    rows = figures(preview)
    names = max(map(len, rows))
    return "\n".join([*lines, *(f"{name:<{names}}  {said}" for name, said in rows.items())])


def rule(title: str, stroke: str) -> str:
    """Return a line with a title at its left."""
    return f"{title} ".ljust(80, stroke)


def trained_word(preview: Preview) -> str:
    """Return the word for the tokens that are learned."""
    return "hidden" if preview.task == "mlm" else "trained"


def text_of(part: Part) -> str:
    """Format a part: trained tokens in brackets; these and special ones in colour if the terminal has it.

    The brackets are rare in texts, and readable in any font.
    """
    text = ""
    for is_trained, run in itertools.groupby(part.pieces, key=lambda piece: piece.trained):
        said = ""
        for piece in run:
            words = readable(piece.text)
            if is_trained or piece.special:
                words = out.paint("1;32" if is_trained else "36", words, sys.stdout)  # bold green, cyan
            said += words
        text += f"⟦{said}⟧" if is_trained else said
    return text.removesuffix("\n")


def readable(text: str) -> str:
    """Escape invisible characters, so that they show and can't control the terminal."""
    # Some scripts and emoji need the last two.
    signs = {"\n": "↵\n", "\t": "⇥   ", "\u200c": "\u200c", "\u200d": "\u200d"}

    def shown(char: str) -> str:
        is_invisible = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        return char.encode("unicode_escape").decode("ascii") if is_invisible else char

    return "".join(signs.get(char) or shown(char) for char in text)


def figures(preview: Preview) -> dict[str, str]:
    """Return the statistics of a preview: name -> a few words."""
    from trahiv_cli.recipe.task_sections import TASK_SECTIONS

    looked_at = preview.looked_at
    total = preview.num_samples
    lengths = preview.lengths
    seen = f", the first {looked_at:,} looked at" if total is None or looked_at < total else ""
    rows = {"samples": (f"{total:,}" if total is not None else "a stream") + seen}
    if preview.packed:
        rows["packed"] = f"into rows of at most {preview.max_length:,} tokens: {preview.rows:,}"
    elif preview.rows < looked_at and preview.task != "reward":
        rows["left out"] = f"{looked_at - preview.rows:,} that would train nothing once they are cut"
    if preview.trained_tokens is not None:
        share = 100 * preview.trained_tokens / max(preview.tokens, 1)
        said = f"{share:.1f} % of the tokens ({preview.trained_tokens:,} of {preview.tokens:,})"
        rows[trained_word(preview)] = f"{said}, ⟦like this⟧"
    if lengths:
        half = f"half of them up to {lengths['median']:,}"
        rows["lengths"] = f"{lengths['shortest']:,} to {lengths['longest']:,} tokens, {half}"
        limit = f"{preview.max_length:,} tokens ({TASK_SECTIONS[preview.task]}.max_length)"
        if preview.task in ("reward", "grpo"):
            rows["limit"] = f"{limit}; longer ones are left out"
        else:
            rows["full"] = f"{preview.full_samples:,} have {limit}, and longer ones are cut"
    if preview.classes:
        rows["classes"] = ", ".join(f"{readable(name)} {n:,}" for name, n in preview.classes.items())
    return rows
