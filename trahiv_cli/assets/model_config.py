"""What kind of model the recipe means: its name, its config, and what is wrong with either."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import ModelSection, Recipe, Task
from trahiv_cli.recipe.upstream import unknown_model_type


class Kind(NamedTuple):
    """The kind of model that a task trains."""

    words: str
    loader: Any  # its `AutoModelFor...`
    configs: Mapping[type[PreTrainedConfig], Any]  # those that the loader knows
    peft_task: str | None  # peft has no class for masked models


CAUSAL = Kind("causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, "CAUSAL_LM")
KINDS: dict[Task, Kind] = {
    "clm": CAUSAL,
    "sft": CAUSAL,
    "dpo": CAUSAL,
    "mlm": Kind("masked language model", AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING, None),
    "seq-cls": Kind(
        "model for sequence classification",
        AutoModelForSequenceClassification,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "SEQ_CLS",
    ),
}

NEXT_STEPS: dict[type[Exception], str] = {
    StrictDataclassError: "Correct the field in `model.config`.",
    OSError: "Check the name and the connection; for a private or gated model run `hf auth login`.",
    ImportError: "Install the package it names.",
    ValueError: "Check the `model` section.",
    SafetensorError: "Check the `model` section.",
}
"""What transformers and the hub raise where a model or tokenizer can't be had -> what to do."""


def model_name(model: ModelSection) -> str:
    """Name the model in messages, and to `from_pretrained` if it has a hub id or folder."""
    return model.model_name_or_path or f"a new {(model.config or {})['model_type']}"


def read_config(recipe: Recipe) -> PreTrainedConfig:
    """Read the model's config, or make it of the recipe's fields; for `seq-cls` with the recipe's labels.

    Raises:
        AssetError: there is no such model, a field does not fit, or the task trains another kind of model.
    """
    model, kind = recipe.model, KINDS[recipe.task]
    if (fields := model.config) is not None:
        model_type = str(fields["model_type"])
        if model_type not in CONFIG_MAPPING:
            raise AssetError(*unknown_model_type(model_type, CONFIG_MAPPING))
        # transformers keeps fields that it does not know, older names among them; only near misses count.
        known = CONFIG_MAPPING[model_type]().to_dict()
        for name in fields.keys() - known.keys():
            if close := difflib.get_close_matches(name, known.keys() - fields.keys(), n=1, cutoff=0.85):
                said = f"A {model_type} config has no field {name!r}."
                raise AssetError(said, f"Did you mean {close[0]!r}?")
        with translated("model config", f"a new {model_type}"):
            config = AutoConfig.for_model(**fields)
    else:
        name = expand_folder(model_name(model))
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise AssetError(
                f"The folder {name!r} is not a model: it has no config.json.",
                "Name the folder that `save_pretrained` wrote.",
            )
        with translated("model", name):
            config = AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=False)
    if type(config) not in kind.configs:
        raise AssetError(
            f"{model_name(model)!r} is a {config.model_type}, which is not a {kind.words} "
            f"(`task: {recipe.task}`).",
            f"Choose a model that transformers' {kind.loader.__name__} can load, or another task.",
        )
    if recipe.seq_cls is not None:
        config.id2label = dict(enumerate(recipe.seq_cls.labels))
        config.label2id = {label: index for index, label in config.id2label.items()}
        config.problem_type = "single_label_classification"
    return config


def expand_folder(name: str) -> str:
    """Expand `~` in a folder's name, which must exist (`AssetError`); a hub id is returned as it is."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        hint = "Check the path, or give a hub id (owner/name)."
        raise AssetError(f"The folder {name!r} does not exist.", hint)
    return name


@contextmanager
def translated(what: str, name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise about a model or tokenizer (`what`) into an `AssetError`."""
    try:
        yield
    except tuple(NEXT_STEPS) as failure:
        hint = next(hint for kind, hint in NEXT_STEPS.items() if isinstance(failure, kind))
        said = " ".join(str(failure).split())[:300]
        raise AssetError(f"The {what} {name!r} could not be loaded: {said}", hint) from failure
