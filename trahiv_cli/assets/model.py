"""Build the recipe's model and tokenizer: from a hub, from a folder, or initialized with the shared seed.

Nothing here runs code that came with a model: `trust_remote_code` is never set.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from trahiv_cli.assets.memory import SAVINGS, Estimate, activation_bytes, add_up, is_out_of_memory
from trahiv_cli.assets.tokenizer import train_tokenizer
from trahiv_cli.errors import AssetError, OutOfMemory, SetupError
from trahiv_cli.recipe.builtin import BPE, BYTES
from trahiv_cli.recipe.paths import is_local
from trahiv_cli.recipe.rows import listed
from trahiv_cli.recipe.schema import ModelSection, Recipe, TrainingSection, repeated_too_often
from trahiv_cli.recipe.task_sections import SCORING_TASKS, Task
from trahiv_cli.recipe.upstream import mistakes_in_config

if TYPE_CHECKING:
    from peft import LoraConfig


class Kind(NamedTuple):
    """The kind of model that a task trains."""

    loader: Any  # its `AutoModelFor...`
    configs: Mapping[type[PreTrainedConfig], Any]  # the configs that the loader knows
    peft_task: str | None  # peft has no class for masked models


def sees_pictures(config: PreTrainedConfig) -> bool:
    """Whether a model of this config reads pictures and text, and writes text."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "vision_config")


def kind_of(task: Task, config: PreTrainedConfig) -> Kind:
    """Return the kind of model that a task trains; for `sft`, a model of this config may see pictures."""
    if task == "mlm":
        return Kind(AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING, None)
    if task in SCORING_TASKS:
        configs = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return Kind(AutoModelForSequenceClassification, configs, "SEQ_CLS")
    if task == "sft" and sees_pictures(config):
        return Kind(AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, "CAUSAL_LM")
    return Kind(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, "CAUSAL_LM")


NEXT_STEPS: dict[type[Exception], str] = {
    StrictDataclassError: "Correct the field in `model.config`.",
    OSError: "Check the name and the connection; for a private or gated model run `hf auth login`.",
    ImportError: "Install the package it names.",
    # transformers raises any of these for a config with an unexpected value.
    **dict.fromkeys(
        (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            SafetensorError,
        ),
        "Check the `model` section.",
    ),
}
"""Errors of transformers and the hub about a model or tokenizer -> the hint."""


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer; it pads with its end-of-text token if it has no pad token.

    Raises:
        AssetError: the tokenizer can't be read, lacks a token for the task, or has more tokens than the model
            has embeddings.
    """
    name, revision = tokenizer_source(recipe.model)
    if name == BYTES:
        tokenizer = ByT5Tokenizer()
    elif name == BPE:
        tokenizer = train_tokenizer()
    else:
        with translated("tokenizer", name):
            folder = expand_folder(name)
            tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=False)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = recipe.data.chat_template
    kind, words = {"mlm": ("mask", "mask"), "seq-cls": ("", "")}.get(recipe.task, ("eos", "end-of-text"))
    if kind and getattr(tokenizer, f"{kind}_token_id") is None:
        raise AssetError(
            f"The tokenizer {name!r} has no {words} token, which `task: {recipe.task}` needs.",
            f"Set `{kind}_token` in its tokenizer_config.json, or another `model.tokenizer_name_or_path`.",
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise AssetError(
                f"The tokenizer {name!r} has no token to pad with.",
                "Set `pad_token` in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
    num_embeddings = read_config(recipe).get_text_config().vocab_size
    if num_embeddings < len(tokenizer):
        raise AssetError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model only {num_embeddings} embeddings.",
            "Set `vocab_size` in `model.config` to at least the former, or name the model's own tokenizer.",
        )
    return tokenizer


def tokenizer_source(model: ModelSection) -> tuple[str, str]:
    """Return the name of the tokenizer, or of a processor that has it, and its revision on the hub."""
    name = model.tokenizer_name_or_path or model_name(model)
    return name, model.revision if name == model.model_name_or_path else "main"


def model_name(model: ModelSection) -> str:
    """Return the model's name for messages, and for `from_pretrained` if it has a hub id or folder."""
    return model.model_name_or_path or f"a new {(model.config or {})['model_type']}"


def read_config(recipe: Recipe) -> PreTrainedConfig:
    """Read the model's config, or make it from the recipe's fields; for `seq-cls` add the recipe's labels.

    Raises:
        AssetError: there is no such model, a field does not fit, or the task trains another kind of model.
    """
    model = recipe.model
    if (fields := model.config) is not None:
        model_type = str(fields["model_type"])
        # transformers keeps unknown fields, such as older names; so only near misses are mistakes.
        known = CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}
        for name in fields.keys() - known.keys():
            if close := difflib.get_close_matches(name, known.keys() - fields.keys(), n=1, cutoff=0.85):
                said = f"A {model_type} config has no field {name!r}."
                raise AssetError(said, f"Did you mean {close[0]!r}?")
        for name, mistake, hint in mistakes_in_config(fields):
            raise AssetError(f"`model.config.{name}`: {mistake}.", hint)
        with translated("model config", f"a new {model_type}"):
            config = AutoConfig.for_model(**fields)
    else:
        name = expand_folder(model_name(model))
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise AssetError(
                f"The folder {name!r} is not a model: it has no config.json.",
                "Name what `save_pretrained` wrote; merge adapters into their model first.",
            )
        with translated("model", name):
            written, _ = PreTrainedConfig.get_config_dict(name, revision=model.revision)
            for _, message in repeated_too_often(written):
                raise AssetError(f"The config of the model {name!r} {message}.", NEXT_STEPS[ValueError])
            config = AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=False)
    # A hub's config may name code of another repository; only the recipe's choice counts.
    config.update({"_attn_implementation": None, "_experts_implementation": None})
    kind = kind_of(recipe.task, config)
    if type(config) not in kind.configs:
        raise AssetError(
            f"{model_name(model)!r} is a {config.model_type}, which `task: {recipe.task}` can't train.",
            f"Choose a model that transformers' {kind.loader.__name__} can load, or another task.",
        )
    config.update(recipe.head)
    return config


def expand_folder(name: str) -> str:
    """Expand `~` in the name of a folder, which must exist (`AssetError`); return a hub id unchanged."""
    path = Path(name).expanduser()
    if is_local(name) and not path.is_dir():
        raise AssetError(f"There is no folder {name!r}.", "Check the path, or give a hub id (owner/name).")
    return str(path) if path.is_dir() else name


@contextmanager
def translated(what: str, name: str) -> Iterator[None]:
    """Turn errors of transformers and the hub about a model or tokenizer (`what`) into an `AssetError`."""
    try:
        yield
    except tuple(NEXT_STEPS) as failure:
        if is_out_of_memory(failure):
            raise
        hint = next(hint for kind, hint in NEXT_STEPS.items() if isinstance(failure, kind))
        if isinstance(failure, OSError) and Path(name).is_dir():
            hint = "Copy the whole folder again, or save the model there once more."
        said = " ".join(str(failure).partition("\nException raised")[0].split())[:300]  # no C++ source line
        if not isinstance(failure, OSError | ImportError | ValueError):  # others seldom state their kind
            said = f"{type(failure).__name__}: {said}"
        raise AssetError(f"The {what} {name!r} could not be loaded: {said}", hint) from failure


def compute_dtype(training: TrainingSection) -> torch.dtype:
    """Return the dtype in which this peer computes; `bf16: auto` is bfloat16 on a GPU that supports it."""
    if training.fp16:
        return torch.float16
    has_bf16 = training.bf16 is True
    if training.bf16 == "auto":
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float32


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, adapters: bool = True
) -> PreTrainedModel:
    """Load the model, or initialize its weights, and add adapters if the recipe has a `peft` section.

    It seeds torch's global generator and leaves it so: every peer with the same `training.seed` and versions
    gets the same initial weights, also in adapters and a new head. The pad token of `tokenizer` becomes the
    model's. Without `adapters` the caller adds them (`adapter_config`).

    Returns:
        A model in train mode, on the CPU; a quantized one on the GPU if there is one. Weights with
        `requires_grad` are float32; the others keep their dtype, or are quantized.

    Raises:
        AssetError: the model can't be loaded, lacks weights that it should have, does not fit the task, or
            lacks layers that `peft` names.
        SetupError: the recipe asks for a quantized model, and bitsandbytes is not installed.
    """
    model = recipe.model
    seed = recipe.training.seed
    config = read_config(recipe)
    ids = {"pad_token_id": tokenizer.pad_token_id}
    if model.config is not None:  # a type's default ids do not fit other tokenizers
        free = {"bos_token_id", "eos_token_id"} - model.config.keys()
        ids |= {name: getattr(tokenizer, name) for name in free}
    config.get_text_config().update(ids)
    options = loading_options(recipe, config)
    loader = kind_of(recipe.task, config).loader
    head: list[str] = []
    torch.manual_seed(seed)
    name = model_name(model)
    if model.config is not None:
        with translated("model", name):
            built = loader.from_config(config, **options)
    else:
        name = expand_folder(name)
        if recipe.quantization is not None:
            options["quantization_config"] = bits_of(recipe)
        options |= {"config": config, "revision": model.revision, "output_loading_info": True}
        with translated("model", name):
            built, info = loader.from_pretrained(name, ignore_mismatched_sizes=True, **options)
        head = head_drawn(built, recipe, info)
    torch.manual_seed(seed)
    return trainable(built, recipe, adapters=adapters, head=head)


def head_drawn(model: PreTrainedModel, recipe: Recipe, info: Mapping[str, Any]) -> list[str]:
    """Return the layers of a new task head, which transformers initialized as the checkpoint lacks them.

    `info` is the loading info that `from_pretrained` returns.

    Raises:
        AssetError: the checkpoint has a weight in another shape, or lacks one outside a new head.
    """
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise AssetError(
            f"The checkpoint's {name!r} has the shape {list(found)}, and the model's {list(wanted)}.",
            "Correct config.json; for `seq-cls`, use the same number of labels, or another model.",
        )
    weights = [name for name, _ in model.named_parameters()]
    drawn = [name for name in weights if name in info["missing_keys"]]
    # Weights outside of the base model, and its pooler, belong to one task. A masked model's head shares
    # weights with its embeddings, and can't be trained beside adapters.
    has_head = recipe.task in SCORING_TASKS or (recipe.task == "mlm" and recipe.peft is None)
    lost = [
        name
        for name in drawn
        if not has_head or (name.startswith(f"{model.base_model_prefix}.") and ".pooler." not in name)
    ]
    if lost:
        said = f"{len(lost)} of {len(weights)} weights are not in the checkpoint, such as {listed(lost[:3])}."
        instead = [name for name in info["unexpected_keys"] if name.endswith(lost[0])]
        hint = "Name a complete model of this kind."
        if instead:
            hint = (
                f"It has {instead[0]!r} instead: save the model without its wrapper "
                "(`_orig_mod.` is torch.compile's prefix, `module.` is DataParallel's)."
            )
        raise AssetError(f"{said} They would be random.", hint)
    return list(dict.fromkeys("pooler" if ".pooler." in name else name.partition(".")[0] for name in drawn))


def estimate(recipe: Recipe, *, length: int) -> Estimate:
    """Estimate the memory that the recipe needs on this peer, without loading a weight; it takes seconds.

    One batch, of samples of `length` tokens, runs on fake tensors (`activation_bytes`).

    Raises:
        AssetError, SetupError: as from `build_model`, if they occur without the weights.
    """
    dtype = compute_dtype(recipe.training)
    outline, quantized = build_outline(recipe)
    held = None
    if not sees_pictures(outline.config):  # whose pictures need memory, too
        with translated("model", model_name(recipe.model)):
            held = activation_bytes(outline, recipe, length, dtype)
    if held is not None:  # a quantized layer is decoded as a whole to compute with it
        held += dtype.itemsize * max((weight.numel() for weight in quantized), default=0)
    return add_up(recipe, outline, quantized, held)


def require_memory(recipe: Recipe) -> Estimate:
    """Require, before anything is loaded, that this peer's GPU and RAM can hold weights and training state.

    Activations are not counted: they grow with samples that have not been read yet.

    Raises:
        OutOfMemory, AssetError, SetupError: as from `require_room` and `estimate`.
    """
    needed = add_up(recipe, *build_outline(recipe), activation_bytes=None)
    require_room(needed, free_bytes())
    return needed


def require_room(needed: Estimate, free: dict[str, int]) -> None:
    """Raise `OutOfMemory`, with both numbers, if the GPU or the RAM has fewer free bytes than needed."""
    for name, needed_bytes in needed.places.items():
        if needed_bytes > free[name]:
            before = " before activations" * (needed.activation_bytes is None)
            raise OutOfMemory(
                f"Training needs {needed_bytes / 2**30:.1f} GiB of {'the ' * (name == 'GPU')}{name}{before}, "
                f"and {free[name] / 2**30:.1f} GiB are free. Nothing was loaded.",
                SAVINGS,
            )


def free_bytes() -> dict[str, int]:
    """Return the free bytes of the `GPU`, if there is one, and of `RAM`; this process counts as free."""
    own = psutil.Process().memory_info()
    free = {"RAM": int(psutil.virtual_memory().available + own.rss - getattr(own, "shared", 0))}
    return free | ({"GPU": torch.cuda.mem_get_info()[0]} if torch.cuda.is_available() else {})


@contextmanager
def bounded(most: int = 100_000) -> Iterator[None]:
    """Raise `AssetError` if the block builds a model with more than `most` layers and weights together.

    Building this many takes some 10 s on the meta device; DeepSeek-V3 has 2,123.
    """
    parts = itertools.count(1)

    def count(*_: Any) -> None:
        if next(parts) > most:
            said = f"The model has more than {most:,} layers and weights; it was not built."
            raise AssetError(said, "Choose a model with fewer: none that can be trained has as many.")

    with (
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
    ):
        yield


@bounded()
def build_outline(recipe: Recipe) -> tuple[PreTrainedModel, frozenset[torch.Tensor]]:
    """Build the model as `build_model` does, but on the meta device; also return the weights to quantize."""
    config = read_config(recipe)
    text_config = config.get_text_config()
    text_config.update({"pad_token_id": 0})  # the tokenizer's comes later; classifiers refuse a batch without
    options = loading_options(recipe, config)
    if options["dtype"] == "auto":
        options["dtype"] = text_config.dtype or torch.float32
    with torch.device("meta"), translated("model", model_name(recipe.model)):
        built = kind_of(recipe.task, config).loader.from_config(config, **options)
    quantized: frozenset[torch.Tensor] = frozenset()
    if (wanted := recipe.quantization) is not None:
        bits_of(recipe)  # raises if that is not possible here
        # As `Bnb4BitHfQuantizer._process_model_before_weight_loading` and `replace_with_bnb_linear` of
        # transformers 5.23 choose them.
        kept = [*(built._keep_in_fp32_modules or ()), *(wanted.llm_int8_skip_modules or ())]
        if wanted.llm_int8_skip_modules is None:
            kept += get_keys_to_not_convert(built)
        quantized = frozenset(
            module.weight
            for name, module in built.named_modules()
            if (type(module) is torch.nn.Linear or isinstance(module, Conv1D))
            and should_convert_module(name, kept)
        )
    with torch.device("meta"):
        return trainable(built, recipe), quantized


def loading_options(recipe: Recipe, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options of dtype and attention; the dtype is "auto" only if the checkpoint decides it."""
    model = recipe.model
    dtype: torch.dtype | str = "auto"
    if recipe.peft is None:
        dtype = torch.float32
    elif model.dtype != "auto":
        dtype = getattr(torch, model.dtype)
    elif model.config is not None:
        dtype = config.dtype or torch.float32
    options = {"dtype": dtype, "trust_remote_code": False}
    if model.attn_implementation != "auto":
        options["attn_implementation"] = model.attn_implementation
    return options


def bits_of(recipe: Recipe) -> BitsAndBytesConfig:
    """Return the quantization config of the base model, or raise `SetupError` without bitsandbytes."""
    wanted = recipe.quantization
    assert wanted is not None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(
            "The recipe asks for a quantized model (`quantization`), and bitsandbytes is not installed.",
            "pip install bitsandbytes, or remove the section `quantization`",
        )
    dtype = compute_dtype(recipe.training)
    if wanted.bnb_4bit_compute_dtype != "auto":
        dtype = getattr(torch, wanted.bnb_4bit_compute_dtype)
    return BitsAndBytesConfig(**wanted.model_dump() | {"bnb_4bit_compute_dtype": dtype})


def trainable(
    model: PreTrainedModel, recipe: Recipe, *, adapters: bool = True, head: Sequence[str] = ()
) -> PreTrainedModel:
    """Add the recipe's adapters, if it has any, and convert all trained weights to float32.

    Beside adapters, the layers of a new `head` are trained and saved too, because no checkpoint has them.
    """
    if adapters and (config := adapter_config(recipe, model, head)) is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, config)
        except ValueError as failure:
            said = " ".join(str(failure).split())[:300]
            raise AssetError(
                f"LoRA could not be put on the model (`peft.target_modules`): {said}",
                f"`all-linear` fits any model; this one has {', '.join(layers_of(model))}.",
            ) from failure
        if recipe.training.activation_checkpointing:
            # A frozen embedding's output needs no gradient, and checkpointing would then compute none at all.
            model.enable_input_require_grads()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model.train()


def adapter_config(recipe: Recipe, model: PreTrainedModel, head: Sequence[str] = ()) -> LoraConfig | None:
    """Return peft's config: the adapters for `model`, and the layers to train in full, with the `head`.

    None without a `peft` section. Raises `AssetError` if the model lacks one of these layers.
    """
    if recipe.peft is None:
        return None
    from peft import LoraConfig

    layers = layers_of(model)
    options = recipe.peft.model_dump()
    options["modules_to_save"] += head
    for name in options["modules_to_save"]:  # peft itself ignores unknown names
        if name not in layers:
            said = f"The model has no layer {name!r} (`peft.modules_to_save`)."
            raise AssetError(said, f"It has {', '.join(layers)}.")
    return LoraConfig(task_type=kind_of(recipe.task, model.config).peft_task, **options)


def layers_of(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's layers, without the path to them."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return sorted(filter(str.isidentifier, names))  # without the numbers in lists
