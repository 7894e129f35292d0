"""Built-in recipes, a text that is the same in every installation of one version of trahiv, and sums.

The text is trahiv's own source and documentation. The embedded default trains on it, because every machine
that can join has it, and it depends on neither Python nor the distribution.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = "builtin/trahiv"
"""The `path` of the text in a recipe's `data.datasets`."""

ARITHMETIC = "builtin/arithmetic"
"""The `path` of the sums of two digits that have one digit: 55 rows with a `prompt` and an `answer`."""

SHAPES = "builtin/shapes"
"""The `path` of small pictures of coloured shapes, with `images`, `prompt` and `completion`: 270 rows."""

BYTES = "builtin/bytes"
"""The name of a tokenizer of single bytes."""

BPE = "builtin/bpe"
"""The name of the tokenizer that is trained on the text when a run starts."""

_PACKAGE = Path(__file__).parents[1]


def builtin_recipes() -> dict[str, Path]:
    """Return the built-in recipes: name -> file."""
    return {path.stem: path for path in _files("configs", "*.yaml")}


def text_files() -> list[Path]:
    """Return the files of the text, in the same order on every machine: documentation, then source."""
    return [*_files("docs", "*.md"), *sorted(_PACKAGE.rglob("*.py"))]


def read_text() -> list[str]:
    """Read the text, one document for each of its files."""
    return [file.read_text(encoding="utf-8") for file in text_files()]


def documents() -> list[dict[str, str]]:
    """Return the rows of `TEXT`."""
    return [{"text": text} for text in read_text()]


def sums() -> list[dict[str, str]]:
    """Return the rows of `ARITHMETIC`."""
    return [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(10) for b in range(10 - a)]


def shapes() -> list[dict[str, Any]]:
    """Return the rows of `SHAPES`, whose pictures have 32 x 32 pixels.

    They are computed with integers, so they are the same on every machine.
    """
    import numpy as np
    from PIL import Image

    rows = []
    colours = {
        "red": (220, 40, 40),
        "green": (40, 180, 60),
        "blue": (50, 80, 220),
        "yellow": (230, 210, 40),
        "white": (240, 240, 240),
    }
    y, x = np.mgrid[:32, :32]
    for across in (10, 16, 22):
        for down in (10, 16, 22):
            right, below = abs(x - across), abs(y - down)
            nearer, farther = np.minimum(right, below), np.maximum(right, below)
            forms = {
                "square": farther <= 7,
                "circle": right**2 + below**2 <= 64,
                "cross": (nearer <= 2) & (farther <= 8),
            }
            for form, inside in forms.items():
                for colour, value in colours.items():
                    picture = Image.fromarray(np.where(inside[..., None], value, 20).astype(np.uint8))
                    for question, answer in (("colour", colour), ("form", form)):
                        rows.append(
                            {
                                "images": [picture],
                                "prompt": [{"role": "user", "content": f"Which {question}?"}],
                                "completion": [{"role": "assistant", "content": answer}],
                            }
                        )
    return rows


BUILT_IN_DATA: dict[str, Callable[[], list[dict[str, Any]]]] = {
    TEXT: documents,
    ARITHMETIC: sums,
    SHAPES: shapes,
}
"""The `path` of each built-in dataset -> a function that returns its rows."""


def how_to_install(requirement: str) -> str:
    """Return the command that adds a requirement, an extra or a version, to this installation of trahiv."""
    if (Path(sys.prefix) / "uv-receipt.toml").exists():  # an environment of `uv tool`, not of pip
        return f"uv tool install {shlex.quote(requirement)}"
    return f"pip install {shlex.quote(requirement)}"


def version() -> str:
    """Return the version of trahiv that is running."""
    from importlib import metadata

    try:
        return metadata.version("trahiv")
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


def _files(folder: str, pattern: str) -> list[Path]:
    """List files in a folder that a wheel has inside the package, and a checkout beside it."""
    in_wheel = _PACKAGE / folder
    in_checkout = _PACKAGE.parent / folder
    return sorted((in_wheel if in_wheel.is_dir() else in_checkout).glob(pattern))
