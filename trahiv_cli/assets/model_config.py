"""What kind of model the recipe means: its name, its config, and what is wrong with either.

Weights are `model.py`'s business; nothing of them is read here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import ModelSection


def model_name(model: ModelSection) -> str:
    """Name the model in messages, and to `from_pretrained` if it has a hub id or folder."""
    return model.model_name_or_path or f"a new {(model.config or {})['model_type']}"


def read_config(model: ModelSection) -> PreTrainedConfig:
    """Read the model's config, or make it of the recipe's fields.

    Args:
        model: a hub id, a local folder, or the fields of a new config.

    Returns:
        The config of a causal language model.

    Raises:
        AssetError: there is no such model or model type, a field is misspelt or does not fit, or it is
            not a causal language model.
    """
    if model.config is not None:
        config = _new_config(model.config)
    else:
        name = expand_folder(model_name(model))
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise AssetError(
                f"The folder {name!r} is not a model: it has no config.json.",
                "Name the folder that `save_pretrained` wrote.",
            )
        with translated("model", name):
            config = AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise AssetError(
            f"{model_name(model)!r} is a {config.model_type}, which is not a causal language model.",
            "Choose a model that transformers' AutoModelForCausalLM can load.",
        )
    return config


def _new_config(fields: dict[str, Any]) -> PreTrainedConfig:
    model_type = str(fields["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise AssetError(
            f"transformers knows no `model_type` {model_type!r}.", did_you_mean(model_type, CONFIG_MAPPING)
        )
    # transformers keeps fields that it does not know, older names among them; only near misses are errors.
    known = CONFIG_MAPPING[model_type]().to_dict()
    for name in fields.keys() - known.keys():
        if close := difflib.get_close_matches(name, known.keys() - fields.keys(), n=1, cutoff=0.85):
            raise AssetError(f"A {model_type} config has no field {name!r}.", f"Did you mean {close[0]!r}?")
    with translated("model config", f"a new {model_type}"):
        return AutoConfig.for_model(**fields)


def expand_folder(name: str) -> str:
    """Expand `~` in a local folder's name; a hub id is returned as it is.

    Raises:
        AssetError: `name` can only be a local folder, and it does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise AssetError(
            f"The folder {name!r} does not exist.", "Check the path, or give a hub id (owner/name)."
        )
    return name


@contextmanager
def translated(what: str, name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise about `name` into an `AssetError`.

    Args:
        what: what is loaded: "model", "tokenizer".
        name: hub id, folder or description of it.
    """
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError) as failure:
        raise AssetError(
            f"The {what} {name!r} could not be loaded: {one_line(failure)}", _next_step(failure)
        ) from failure


def _next_step(failure: Exception) -> str:
    if isinstance(failure, StrictDataclassError):
        return "Correct the field in `model.config`."
    if isinstance(failure, OSError):
        return "Check the name and the connection; for a private or gated model run `hf auth login`."
    if isinstance(failure, ImportError):
        return "Install the package it names."
    return "Check the `model` section."


def one_line(failure: Exception) -> str:
    """Put a message of many lines on one, of at most 300 characters."""
    return " ".join(str(failure).split())[:300]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint at the nearest of the `known` names."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else "Check the name."
