"""What upstream's libraries accept, found or said without importing them, which would take seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trahiv_cli.recipe.paths import closest

_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml"}
"""Tracker -> what pip calls it; the others have one name."""


@cache
def model_types() -> frozenset[str]:
    """Return every model type that the installed transformers could know; nothing if that is not clear.

    These are all texts in the files that list them: some are no model type, but all others are none.
    """
    spec = find_spec("transformers")
    files = Path(spec.origin if spec and spec.origin else "").parent.glob("models/auto/*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    texts = frozenset(re.findall(r"""["']([\w.-]+)["']""", source))
    return texts if "llama" in texts else frozenset()  # else the files are not what we take them for


def unknown_model_type(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Say that transformers has no such model type, and which was probably meant."""
    near = closest(name, filter(str.islower, known))
    hint = f"Did you mean {near!r}?" if near else "Use one of transformers' model types, for example 'llama'."
    return f"transformers knows no `model_type` {name!r}.", hint


def without_tracker(name: str) -> tuple[str, str]:
    """Say that a tracker can't be used here, and what to do about it."""
    said = f"The tracker {name!r} (`training.report_to`) is not installed here, or not set up."
    return said, f"pip install {_PACKAGES.get(name, name)}, or --set training.report_to=[]"


def mistake_in(template: str) -> str:
    """Say what is wrong with a chat template's syntax, and on which of its lines, if anything is."""
    from jinja2 import Environment, TemplateSyntaxError

    # transformers' own tag, which marks what the assistant says, is read as one of Jinja's.
    known = re.sub(r"({%[-+]?\s*)generation(\s*[-+]?%})", r"\1if true\2", template)
    known = re.sub(r"({%[-+]?\s*)endgeneration(\s*[-+]?%})", r"\1endif\2", known)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(known)
    except TemplateSyntaxError as error:
        return f"{str(error.message).rstrip('.')} (line {error.lineno} of the template)"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:  # a number that is too long for Python
        return str(error)
    return ""
