"""The model and its tokenizer from the recipe: from a hub, from a folder, or drawn from the shared seed.

Nothing here runs code that came with a model (`trust_remote_code` is never set), and nothing is changed
on disk beyond the hub's own cache.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import (
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

from trahiv_cli.assets.bpe import train_tokenizer
from trahiv_cli.assets.memory import GIB, Estimate, add_up, savings
from trahiv_cli.assets.model_config import (
    KINDS,
    did_you_mean,
    expand_folder,
    model_name,
    one_line,
    read_config,
    translated,
)
from trahiv_cli.assets.rehearsal import Pass, activation_bytes
from trahiv_cli.errors import AssetError, OutOfMemory, SetupError
from trahiv_cli.recipe.builtin import BPE, BYTES, read_text
from trahiv_cli.recipe.schema import Recipe, Task, TrainingSection, section_of

if TYPE_CHECKING:
    from peft import LoraConfig

_PEFT_TASKS: dict[Task, str] = {
    **dict.fromkeys(("clm", "sft", "dpo"), "CAUSAL_LM"),
    "seq-cls": "SEQ_CLS",
}
"""Tasks that peft has a class for; it knows none for `mlm`."""


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and make sure that it has what the task needs and that the model knows its tokens.

    Returns:
        A tokenizer that can pad, with its end-of-text token if it has no other for that; for `mlm` with a
        mask token, for tasks that write text with an end-of-text token.

    Raises:
        AssetError: it cannot be found or read, lacks one of these tokens, or has more tokens than the
            model has embeddings.
    """
    model = recipe.model
    name = model.tokenizer_name_or_path or model_name(model)
    if name == BYTES:
        tokenizer = ByT5Tokenizer()
    elif name == BPE:
        tokenizer = train_tokenizer(read_text())
    else:
        revision = model.revision if name == model.model_name_or_path else "main"
        with translated("tokenizer", name):
            tokenizer = AutoTokenizer.from_pretrained(
                expand_folder(name), revision=revision, trust_remote_code=False
            )
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = recipe.data.chat_template
    kind, words = {"mlm": ("mask", "mask"), "seq-cls": ("", "")}.get(recipe.task, ("eos", "end-of-text"))
    if kind and getattr(tokenizer, f"{kind}_token_id") is None:
        raise AssetError(
            f"The tokenizer {name!r} has no {words} token, which `task: {recipe.task}` needs.",
            f"Set `{kind}_token` in its tokenizer_config.json, or name another "
            "`model.tokenizer_name_or_path`.",
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


def compute_dtype(training: TrainingSection) -> torch.dtype:
    """Return what this peer computes in: bfloat16 or float16 by autocast, or float32.

    `bf16: auto` is bfloat16 where a GPU has it; a CPU would only be slower with it.
    """
    if training.fp16:
        return torch.float16
    has_bf16 = training.bf16 is True or (
        training.bf16 == "auto"
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return torch.bfloat16 if has_bf16 else torch.float32


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, adapters: bool = True
) -> PreTrainedModel:
    """Load the model, or draw its weights, and put adapters on it if the recipe has a `peft` section.

    It seeds torch's global generator and leaves it so. Every peer with the same `training.seed` and versions
    gets the same initial weights, those of adapters and of a new head included: averaging different ones
    would cancel them out.

    The pad token of `tokenizer` becomes the model's. Without `adapters` the caller adds them
    (`adapter_config`).

    Returns:
        A model (with adapters, a `PeftModel`) in train mode, on the CPU; a quantized one on the GPU if there
        is one. Weights with `requires_grad` are float32, as an offloading optimizer needs and small updates
        too; the others keep their dtype, or are quantized.

    Raises:
        AssetError: it cannot be found, read, built or quantized, is not the kind of model that the task
            trains, or has no layers of the names that `peft` asks for.
        SetupError: it is to be quantized and bitsandbytes is not installed.
    """
    model, seed = recipe.model, recipe.training.seed
    config = read_config(recipe)
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
    options = _options(recipe, config)
    loader = KINDS[recipe.task].loader
    torch.manual_seed(seed)
    with translated("model", model_name(model)):
        if model.config is not None:
            built = loader.from_config(config, **options)
        else:
            built = loader.from_pretrained(
                expand_folder(model_name(model)),
                config=config,
                revision=model.revision,
                **options,
                **_quantization(recipe),
            )
    torch.manual_seed(seed)
    return _trainable(built, recipe if adapters else None).train()


def estimate(recipe: Recipe, *, length: int | None = None) -> Estimate:
    """Say what the recipe costs this peer, in memory and in traffic, without loading a weight.

    The model is built on the meta device and one batch, of samples of `length` tokens or else of the task's
    `max_length`, is rehearsed with it (`rehearsal.py`); both take seconds for any size, and no memory.

    Raises:
        AssetError: as from `build_model`, for all that can be known without the weights.
        SetupError: it is to be quantized and bitsandbytes is not installed.
    """
    training = recipe.training
    max_length = getattr(recipe, section_of(recipe.task) or "").max_length
    batch = Pass(
        rows=training.per_device_train_batch_size * (2 if recipe.dpo is not None else 1),
        length=min(length or max_length, max_length),
        dtype=compute_dtype(training),
        has_checkpoints=training.activation_checkpointing,
        has_tiled_head=recipe.sft is not None or recipe.dpo is not None,
        has_triton=torch.cuda.is_available(),
    )
    outline, quantized = build_outline(recipe)
    held = activation_bytes(outline, batch)
    if held is not None:  # a quantized layer is decoded as a whole to compute with it
        held += batch.dtype.itemsize * max((weight.numel() for weight in quantized), default=0)
    return add_up(recipe, outline, quantized, held)


def require_memory(recipe: Recipe) -> Estimate:
    """Say before anything is loaded whether this peer's memory can hold what training needs.

    With a GPU its free memory is compared with the model's share, and RAM with the rest; without, RAM with
    everything. Only what is sure is counted: activations grow with samples that nobody has seen yet.

    Returns:
        The estimate, without activations.

    Raises:
        OutOfMemory: it cannot fit; with both numbers.
        AssetError, SetupError: as from `estimate`.
    """
    needed = add_up(recipe, *build_outline(recipe), activation_bytes=None)
    parts = {"RAM": (needed.held_on_device + needed.held_on_host, free_ram_bytes())}
    if needed.on_gpu:
        on_device = needed.held_on_device, torch.cuda.mem_get_info()[0]
        parts = {"the GPU": on_device, "RAM": (needed.held_on_host, free_ram_bytes())}
    for where, (needed_bytes, free_bytes) in parts.items():
        if needed_bytes > free_bytes:
            raise OutOfMemory(
                f"Training needs {needed_bytes / GIB:.1f} GiB of {where} before activations, and "
                f"{free_bytes / GIB:.1f} GiB are free. Nothing was loaded.",
                savings(recipe),
            )
    return needed


def free_ram_bytes() -> int:
    """Count the RAM that a run of this process could use, what it uses already included."""
    own = psutil.Process().memory_info()
    return int(psutil.virtual_memory().available + own.rss - own.shared)


def build_outline(recipe: Recipe) -> tuple[PreTrainedModel, frozenset[torch.Tensor]]:
    """Build the model as `build_model` does, but on the meta device; and name the weights to be quantized."""
    config = read_config(recipe)
    text_config = config.get_text_config()
    text_config.pad_token_id = 0  # the tokenizer's comes later, and classifiers refuse a batch without one
    options = _options(recipe, config)
    if options["dtype"] == "auto":
        options["dtype"] = text_config.dtype or torch.float32
    with torch.device("meta"), translated("model", model_name(recipe.model)):
        built = KINDS[recipe.task].loader.from_config(config, **options)
    quantized: frozenset[torch.Tensor] = frozenset()
    if (wanted := recipe.quantization) is not None:
        _quantization(recipe)  # or says that it is not possible here
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
        return _trainable(built, recipe).train(), quantized


def _options(recipe: Recipe, config: PreTrainedConfig) -> dict[str, Any]:
    """Choose dtype and attention; the dtype is "auto" only for a checkpoint that decides itself."""
    model = recipe.model
    dtype: torch.dtype | str = model.dtype
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


def _quantization(recipe: Recipe) -> dict[str, Any]:
    """Say to `from_pretrained` how the base is quantized."""
    wanted = recipe.quantization
    if wanted is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError(
            "The recipe asks for a quantized model (`quantization`), and bitsandbytes is not installed.",
            "pip install bitsandbytes, or remove the section `quantization`",
        )
    dtype = compute_dtype(recipe.training)
    if wanted.bnb_4bit_compute_dtype != "auto":
        dtype = getattr(torch, wanted.bnb_4bit_compute_dtype)
    fields = wanted.model_dump() | {"bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(**fields)}


def _trainable(model: PreTrainedModel, recipe: Recipe | None) -> PreTrainedModel:
    """Add the recipe's adapters, if it has any, and hold everything that is trained in float32."""
    if recipe is not None and (config := adapter_config(recipe, model)) is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, config)
        except ValueError as failure:
            names = ", ".join(sorted(filter(str.isidentifier, _layers(model))))
            raise AssetError(
                f"LoRA could not be put on the model (`peft.target_modules`): {one_line(failure)}",
                f"`all-linear` fits any model; this one has {names}.",
            ) from failure
        if recipe.training.activation_checkpointing:
            # A frozen embedding's output needs no gradient, and checkpointing would then compute none at all.
            model.enable_input_require_grads()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def adapter_config(recipe: Recipe, model: PreTrainedModel) -> LoraConfig | None:
    """Say to peft which adapters to put on `model`; None without a `peft` section.

    Raises:
        AssetError: `model` has no layer of a name in `peft.modules_to_save`.
    """
    if recipe.peft is None:
        return None
    from peft import LoraConfig

    layers = _layers(model)
    for name in recipe.peft.modules_to_save:  # peft itself passes over those that it does not find
        if name not in layers:
            raise AssetError(
                f"The model has no layer {name!r} (`peft.modules_to_save`).", did_you_mean(name, layers)
            )
    return LoraConfig(task_type=_PEFT_TASKS.get(recipe.task), **recipe.peft.model_dump())


def _layers(model: PreTrainedModel) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in model.named_modules()}
