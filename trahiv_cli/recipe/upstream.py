"""Values that other libraries accept, found without importing these libraries, which would take seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trahiv_cli.recipe.paths import closest

SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "min_lr_ratio",
        "num_cycles",
        "warmup_type",
        "decay_type",
    ),
}
"""Schedule of transformers -> the keywords that it takes."""

BORDERLESS = frozenset({"biogpt", "bloom", "falcon_mamba", "mamba", "mpt", "openai-gpt", "opt", "rwkv"})
"""Causal models in which a packed sample depends on the samples before it, whatever its position ids."""


def _source(pattern: str) -> str:
    """Return the source of transformers' files that match `pattern`; empty if there are none."""
    spec = find_spec("transformers")
    files = Path(spec.origin if spec and spec.origin else "").parent.glob(pattern)
    return "".join(file.read_text(encoding="utf-8") for file in files)


@cache
def model_types() -> frozenset[str]:
    """Return every model type that the installed transformers could know; empty if that is unclear.

    The set has all texts in the files that list model types. Some are no model type, but none is missing.
    """
    texts = frozenset(re.findall(r"""["']([\w.-]+)["']""", _source("models/auto/*.py")))
    return texts if "llama" in texts else frozenset()  # else the files have another form than expected


@cache
def _keys(file: str, table: str) -> frozenset[str]:
    """Return the keys of a dict in a file of transformers; empty if it is not written as expected."""
    found = re.search(rf"^{table}\b[^\n]*{{\n(.*?)^}}", _source(file), re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^    "(\w+)":', found[1], re.MULTILINE)) if found else frozenset()


def mistakes_in_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each field of a model's config whose value transformers lacks: name, mistake, hint."""
    for field, word in config.items():
        known: frozenset[str] = frozenset()
        if field.endswith("hidden_act") or field in ("hidden_activation", "activation_function"):
            known = _keys("activations.py", "ACT2CLS")
        elif field in ("dtype", "torch_dtype"):
            known = frozenset("auto float half double float16 bfloat16 float32 float64".split())
        elif field in ("rope_scaling", "rope_parameters") and isinstance(word, dict):
            known = _keys("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS") | {"default", "mrope", "su"}
            word = word.get("rope_type", word.get("type"))
        if isinstance(word, str) and len(known) > 3 and word not in known:
            near = closest(word, known)
            meant = f"did you mean {near!r}? " if near else ""
            hint = f"{meant}It may be {', '.join(sorted(known))}."
            yield field, f"transformers knows no {word!r} here", hint


def mistakes_in_schedule(name: str, keywords: Mapping[str, Any], rate: float) -> Iterator[tuple[str, str]]:
    """Yield each mistake in a schedule's keywords: the keyword, or "", and the message.

    `rate` is the recipe's learning rate.
    """
    known = SCHEDULES[name]
    for keyword, value in keywords.items():
        if keyword not in known:
            yield keyword, f"is no keyword of `{name}`, which takes {', '.join(known) or 'none'}"
        elif not keyword.endswith("_type") and type(value) not in (int, float):
            yield keyword, f"should be a number, got {value!r}"
        elif keyword == "lr_end" and value >= rate:
            yield keyword, f"should be below `learning_rate` ({rate:g}), got {value:g}"
    if "min_lr" in known and len({"min_lr", "min_lr_rate"} & keywords.keys()) != 1:
        yield "", f"`{name}` needs either `min_lr` or `min_lr_rate`"
    if "num_decay_steps" in known and "num_decay_steps" not in keywords:
        yield "", f"`{name}` needs `num_decay_steps`"


def unknown_model_type(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Return the message about a model type that transformers lacks, and a hint with the nearest one."""
    near = closest(name, filter(str.islower, known))
    hint = f"Did you mean {near!r}?" if near else "Use one of transformers' model types, for example 'llama'."
    return f"transformers knows no `model_type` {name!r}.", hint


def without_tracker(name: str) -> tuple[str, str]:
    """Return the message about a tracker that can't be used here, and the hint."""
    said = f"The tracker {name!r} (`training.report_to`) is not installed here, or not set up."
    package = {"azure_ml": "azureml-core", "comet_ml": "comet-ml"}.get(name, name)
    return said, f"pip install {package}, or --set training.report_to=[]"


def mistake_in_pattern(pattern: str) -> str:
    """Return the error in a regular expression, or "" if there is none."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        return str(error)
    return ""


def mistake_in(template: str) -> str:
    """Return the error in a chat template's syntax, with its line, or "" if there is none."""
    from jinja2 import Environment, TemplateSyntaxError

    # transformers' own tag, which marks the assistant's text, is replaced by a tag of Jinja's.
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
