"""Fine-tune one Transformers model together over the internet.

The public API: the names that `from trahiv_cli import ...` offers. Its exceptions are in `trahiv_cli.errors`.
Importing the package is cheap: the module behind a name, with torch and transformers, loads on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trahiv_cli import errors

if TYPE_CHECKING:
    from trahiv_cli.recipe.load import load_recipe
    from trahiv_cli.train.enabling import enable
    from trahiv_cli.train.settings import SwarmTrainingArguments
    from trahiv_cli.train.trainer import SwarmTrainer, SwarmTrainerMixin
    from trahiv_cli.train.trl import SwarmDPOTrainer, SwarmSFTTrainer

    __version__: str

__all__ = [
    "SwarmDPOTrainer",
    "SwarmSFTTrainer",
    "SwarmTrainer",
    "SwarmTrainerMixin",
    "SwarmTrainingArguments",
    "__version__",
    "enable",
    "errors",
    "load_recipe",
]

_HOMES = {
    "SwarmDPOTrainer": "trahiv_cli.train.trl",
    "SwarmSFTTrainer": "trahiv_cli.train.trl",
    "SwarmTrainer": "trahiv_cli.train.trainer",
    "SwarmTrainerMixin": "trahiv_cli.train.trainer",
    "SwarmTrainingArguments": "trahiv_cli.train.settings",
    "enable": "trahiv_cli.train.enabling",
    "load_recipe": "trahiv_cli.recipe.load",
}


def __getattr__(name: str) -> object:
    """Import the module behind a name on first use, and cache its value."""
    value: object
    if name == "__version__":
        value = import_module("trahiv_cli.recipe.builtin").version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
