"""Arguments and options that several commands share, so that a word means the same in all of them."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A file, or the name of a built-in recipe.", show_default=False),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Replace one value of the recipe; repeats.",
        show_default=False,
    ),
]
