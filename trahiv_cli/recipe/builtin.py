"""Built-in recipes, a text that is the same in every installation of one version of trahiv, and sums.

The text is trahiv's own source and documentation. The embedded default trains on it, because every machine
that can join has it, and it depends on neither Python nor the distribution.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

TEXT = "builtin/trahiv"
"""The `path` of the text in a recipe's `data.datasets`."""

ARITHMETIC = "builtin/arithmetic"
"""The `path` of the sums of two digits that have one digit: 55 rows with a `prompt` and an `answer`."""

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


def sums() -> list[dict[str, str]]:
    """Return the rows of `ARITHMETIC`."""
    return [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(10) for b in range(10 - a)]


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
