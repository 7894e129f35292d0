"""The model and its tokenizer from the recipe: from a hub, from a folder, or drawn from the shared seed.

Nothing here runs code that came with a model (`trust_remote_code` is never set), and nothing is changed
on disk beyond the hub's own cache.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trahiv_cli.assets.memory import GIB, MemoryEstimate, estimate_memory
from trahiv_cli.assets.model_config import (
    did_you_mean,
    expand_folder,
    model_name,
    one_line,
    read_config,
    translated,
)
from trahiv_cli.errors import AssetError, OutOfMemory
from trahiv_cli.recipe.schema import ModelSection, PeftSection, TrainingSection

BUILTIN_BYTES = "builtin/bytes"


def build_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer, make sure that it can end and pad a text, and that the model knows its tokens.

    Args:
        model: names the tokenizer (`builtin/bytes` needs no file) and the model it is for.

    Returns:
        A tokenizer with an end-of-text token; that one also pads if it has no other for it.

    Raises:
        AssetError: it cannot be found or read, has no end-of-text token, or has more tokens than the
            model has embeddings.
    """
    tokenizer = _load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise AssetError(
            f"The tokenizer {_tokenizer_name(model)!r} has no end-of-text token.",
            "Set `eos_token` in its tokenizer_config.json, or name another `model.tokenizer_name_or_path`.",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    num_embeddings = read_config(model).get_text_config().vocab_size
    if num_embeddings < len(tokenizer):
        raise AssetError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model only {num_embeddings} embeddings.",
            "Set `vocab_size` in `model.config` to at least the former, or name the model's own tokenizer.",
        )
    return tokenizer


def build_model(model: ModelSection, peft: PeftSection | None, *, seed: int) -> PreTrainedModel:
    """Load the model, or draw its weights, and put adapters on it if the recipe has a `peft` section.

    Seeds torch's global generator and leaves it so. Every peer with the same `seed` and versions gets the
    same initial weights, those of adapters included: averaging unlike ones would cancel them out.

    Args:
        model: where it comes from, and the dtype of weights that are not trained.
        peft: the adapters; None trains every weight.
        seed: shared by all peers.

    Returns:
        A model (with `peft`, a `PeftModel`) on the CPU, in train mode. Weights with `requires_grad` are
        float32, as an offloading optimizer needs and small updates too; the others keep their dtype.

    Raises:
        AssetError: it cannot be found, read or built, is not a causal language model, or has no layers of
            the names that `peft` asks for.
    """
    config = read_config(model)
    options = _options(model, config, peft)
    torch.manual_seed(seed)
    with translated("model", model_name(model)):
        if model.config is not None:
            built = AutoModelForCausalLM.from_config(config, **options)
        else:
            built = AutoModelForCausalLM.from_pretrained(
                expand_folder(model_name(model)), config=config, revision=model.revision, **options
            )
    torch.manual_seed(seed)
    return _trainable(built, peft).train()


def require_memory(
    model: ModelSection,
    peft: PeftSection | None,
    training: TrainingSection,
    *,
    available_bytes: int | None = None,
) -> MemoryEstimate:
    """Say before anything is loaded whether this peer's memory can hold what training needs.

    The model is built on the meta device, which takes seconds for any size and no memory. With a GPU its
    free memory is compared with the model's share, and RAM with the rest; without, RAM with everything.

    Args:
        model: the model to be trained.
        peft: its adapters, or None.
        training: names the optimizer.
        available_bytes: the memory of a CPU peer, instead of asking the machine.

    Returns:
        The estimate, by purpose. Activations come on top of it.

    Raises:
        OutOfMemory: it cannot fit; with both numbers.
        AssetError: as from `build_model`, for all that can be known without the weights.
    """
    config = read_config(model)
    options = _options(model, config, peft)
    if options["dtype"] == "auto":
        options["dtype"] = config.get_text_config().dtype or torch.float32
    with torch.device("meta"), translated("model", model_name(model)):
        built = AutoModelForCausalLM.from_config(config, **options)
    with torch.device("meta"):
        estimate = estimate_memory(_trainable(built, peft), training)
    free_bytes = psutil.virtual_memory().available if available_bytes is None else available_bytes
    if available_bytes is None and torch.cuda.is_available():
        _require("the GPU", estimate.device_bytes, torch.cuda.mem_get_info()[0], peft)
        _require("RAM", estimate.host_bytes, free_bytes, peft)
    else:
        _require("RAM", estimate.total_bytes, free_bytes, peft)
    return estimate


def _require(where: str, needed_bytes: int, free_bytes: int, peft: PeftSection | None) -> None:
    if needed_bytes <= free_bytes:
        return
    if peft is None:
        hint = "Add a `peft` section (LoRA) to train adapters only, or choose a smaller model."
    else:
        hint = "Set `model.dtype: bfloat16`, lower `peft.r`, or choose a smaller model."
    raise OutOfMemory(
        f"Training needs {needed_bytes / GIB:.1f} GiB of {where} before activations, and "
        f"{free_bytes / GIB:.1f} GiB are free. Nothing was loaded.",
        hint,
    )


def _options(model: ModelSection, config: PreTrainedConfig, peft: PeftSection | None) -> dict[str, Any]:
    """Choose dtype and attention; the dtype is "auto" only for a checkpoint that decides itself."""
    dtype: torch.dtype | str = model.dtype
    if peft is None:
        dtype = torch.float32
    elif model.dtype != "auto":
        dtype = getattr(torch, model.dtype)
    elif model.config is not None:
        dtype = config.dtype or torch.float32
    attention = (
        {} if model.attn_implementation == "auto" else {"attn_implementation": model.attn_implementation}
    )
    return {"dtype": dtype, "trust_remote_code": False, **attention}


def _trainable(model: PreTrainedModel, peft: PeftSection | None) -> PreTrainedModel:
    """Add the adapters and hold everything that is trained in float32."""
    if peft is not None:
        model = _with_adapters(model, peft)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def _with_adapters(model: PreTrainedModel, peft: PeftSection) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    layers = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in peft.modules_to_save:  # peft itself passes over those that it does not find
        if name not in layers:
            raise AssetError(
                f"The model has no layer {name!r} (`peft.modules_to_save`).", did_you_mean(name, layers)
            )
    try:
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **peft.model_dump()))
    except ValueError as failure:
        names = ", ".join(sorted(filter(str.isidentifier, layers)))
        raise AssetError(
            f"LoRA could not be put on the model (`peft.target_modules`): {one_line(failure)}",
            f"`all-linear` fits any model; this one has {names}.",
        ) from failure


def _load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    name = _tokenizer_name(model)
    if name == BUILTIN_BYTES:
        return ByT5Tokenizer()
    revision = model.revision if name == model.model_name_or_path else "main"
    with translated("tokenizer", name):
        return AutoTokenizer.from_pretrained(expand_folder(name), revision=revision, trust_remote_code=False)


def _tokenizer_name(model: ModelSection) -> str:
    return model.tokenizer_name_or_path or model_name(model)
