"""The settings that peers of a drop-in compare, as short texts by name.

Peers with a recipe compare their agreement before they load anything. Peers of a drop-in have no recipe:
their scripts or notebooks may differ in any line. They compare

- all arguments except `MAY_DIFFER`,
- the shared fields of `hivemind_config.opt` and `swarm`,
- the results of several arguments: the last step, the precision, the seed of the data's order,
- the names of the loss and the data collator,
- the optimizer, if the arguments do not determine it,
- the configurations of the model and its adapters,
- some samples.

An argument at its default is left out, because a library version without this argument computes the same.
`ALWAYS` lists the exceptions. A test fails if a library gets a new argument or another default.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Trainer, set_seed

from trahiv_cli.recipe.schema import TrainingSection, marks_of
from trahiv_cli.recipe.section import OWN, Section
from trahiv_cli.step.build import UPSTREAM
from trahiv_cli.train.checkpoint import random_states, set_random_states
from trahiv_cli.train.comparison import VALUES, asset_digests
from trahiv_cli.train.division import Divided, DividedSampler
from trahiv_cli.train.settings import score_name

MAY_DIFFER = frozenset(
    # The locations of this peer's files; peers compare the model and the tokenizer themselves.
    "output_dir logging_dir resume_from_checkpoint hivemind_config model_init_kwargs trust_remote_code "
    "chat_template_path push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
    "hub_revision "
    # This peer's share of a step, and the way in which its device computes it.
    "per_device_train_batch_size gradient_accumulation_steps auto_find_batch_size use_cpu tf32 "
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing "
    "gradient_checkpointing_kwargs activation_offloading torch_compile torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps use_liger_kernel liger_kernel_config use_cache "
    "full_determinism padding_free pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size "
    # The data loader; `dataloader_drop_last` has no effect in a swarm.
    "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc "
    # Logs and reports.
    "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level log_level_replica "
    "log_on_each_node disable_tqdm include_num_input_tokens_seen report_to run_name project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id debug skip_memory_metrics "
    # Evaluations and checkpoints.
    "do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start eval_packing "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps per_device_eval_batch_size "
    "prediction_loss_only batch_eval_metrics include_for_metrics bf16_full_eval fp16_full_eval "
    "save_strategy save_steps save_total_limit save_only_model save_on_each_node enable_jit_checkpoint "
    "ignore_data_skip "
    "restore_callback_states_from_checkpoint "
    # Arguments that a swarm refuses, or that have no effect in a single process.
    "fsdp fsdp_config deepspeed parallelism_config local_rank ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    # Peers compare their results instead: `max_steps`, `precision`, `seed of the data's order` and `score`.
    "max_steps num_train_epochs bf16 fp16 seed data_seed metric_for_best_model greater_is_better".split()
)
"""Arguments of Trainers that may differ between peers."""

ALWAYS = frozenset(
    name for name in TrainingSection.model_fields if OWN not in marks_of(("training", name))
) | {"loss_type", "router_aux_loss_coef"}
"""Arguments that are compared even at their defaults, which depend on the class or the version."""

CONFIG_MAY_DIFFER = frozenset(
    "transformers_version architectures output_hidden_states return_dict dtype use_cache label2id "
    "problem_type "  # a model sets it at its first batch
    # Fields of adapters.
    "base_model_name_or_path revision inference_mode auto_mapping peft_version runtime_config".split()
)
"""Fields of a model's or adapter's configuration that are about its origin or the way it is computed."""


def compared_by(
    trainer: Trainer, max_steps: int, divided: Divided | None, *, has_recipe: bool
) -> dict[str, str]:
    """Return all texts that a peer compares with the others, by name, for `Comparison`.

    The model must be ready to train. The run ends at `max_steps` of the swarm. Peers divide the data in the
    order of `divided`. With a recipe, they have compared the settings already.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = None
    own = asset_digests(trainer.plain_model, tokenizer)
    if (reader := getattr(trainer.processing_class, "image_processor", None)) is not None:
        own["image processor"] = digest_of_settings(reader)
        if has_recipe and isinstance(divided, DividedSampler):  # a recipe's digest does not cover pictures
            own[VALUES] = digest_of_samples(trainer.train_dataset)
    if divided is not None:
        own |= divided.size
    return own if has_recipe else own | settings_of(trainer, max_steps, divided)


def settings_of(trainer: Trainer, max_steps: int, divided: Divided | None) -> dict[str, str]:
    """Return the settings that must be equal on all peers of a drop-in, by name; see `compared_by`."""
    settings = trainer.swarm_settings
    args = trainer.args
    model = trainer.plain_model
    own = {field.name for field in fields(args) if field.metadata.get("may_differ")}
    shared = _changed(args, MAY_DIFFER | own, ALWAYS) | {
        "max_steps": max_steps,
        "precision": args.mixed_precision,
        "loss": [cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)],
        "loss function": trainer.compute_loss_func,
        "data collator": trainer.data_collator,
    }
    shared |= trainer.own_optimizer()
    if trainer.is_scored and (score_name(args) != "eval_loss" or args.greater_is_better):
        shared["score"] = score_name(args), args.greater_is_better
    if divided is not None:
        shared["seed of the data's order"] = divided.seed
    if isinstance(divided, DividedSampler):
        shared[VALUES] = digest_of_samples(trainer.train_dataset)
    shared |= _shared(settings.opt, "hivemind_config", "opt")
    shared |= _shared(settings.swarm, "swarm")
    configs = [("config", getattr(model, "config", None))]
    configs += [("peft", adapter) for adapter in getattr(model, "peft_config", {}).values()]
    for kind, config in configs:
        if is_dataclass(config):
            shared |= {f"{kind}.{name}": value for name, value in _changed(config, CONFIG_MAY_DIFFER).items()}
    return {name: text_of(value) for name, value in shared.items()}


def text_of(value: object) -> str:
    """Format a setting as one short line, equal on all peers; a digest replaces the end of a long one."""
    plain = _plain(value)
    text = plain if isinstance(plain, str) and plain.isprintable() else repr(plain)
    if len(text) <= 48:
        return text
    return f"{text[:24]}... {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of_settings(image_processor: Any) -> str:
    """Digest how an image processor changes pictures, whichever library it uses; in hexadecimal."""
    named = image_processor.to_dict().items()
    kinds = "image_processor_type", "processor_class"
    settings = sorted((name, str(value)) for name, value in named if name not in kinds)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def digest_of_samples(samples: Any) -> str:
    """Digest 16 to 31 samples of the data, or all if there are fewer; return it in hexadecimal.

    Each sample is read twice. If the readings differ, samples are drawn at random, and the result is
    `random`. The random generators are left unchanged.
    """
    samples = copy.copy(samples)  # a file that the copy opens is not passed on to the loader's workers

    def digest(seed: int) -> str:
        set_seed(seed)
        positions = range(0, len(samples), max(1, len(samples) // 16))
        read = [_outline(samples[position]) for position in positions]
        return hashlib.sha256(repr(read).encode()).hexdigest()[:16]

    before = random_states()
    try:
        first = digest(0)
        again = digest(1)
    finally:
        set_random_states(before)
    return first if first == again else "random"


def _outline(value: Any) -> Any:
    """Reduce a sample, or a part of it, to plain data that is equal on all machines.

    Floats and pixels are reduced to their shape and mean absolute value, because processors and libraries
    round them differently. An absolute path is reduced to its last part, and an object that is neither data
    nor a picture to its name or class.
    """
    if hasattr(value, "__array_interface__"):  # a PIL image
        value = np.asarray(value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" and value.dtype != np.uint8:
            return _outline(value.tolist())
        return value.shape, f"{np.abs(value).mean(dtype=float):.2g}" if value.size else ""
    if isinstance(value, Mapping):
        return {str(key): _outline(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_outline(part) for part in value]
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(value)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Reduce a setting to plain data, and a function or another object to a name."""
    value = UPSTREAM.get(type(value), value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        value = value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: _plain(_changed(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)} or None
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value] or None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, int | float | str):
        return value
    return getattr(value, "__name__", type(value).__name__)


def _changed(
    holder: Any, may_differ: frozenset[str] = frozenset(), always: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields, not in `may_differ`, that are not at their defaults or are in `always`."""
    changed: dict[str, Any] = {}
    for field in fields(holder):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(holder, field.name)
        is_changed = field.name in always or _plain(value) != _plain(default)
        if is_changed and field.name not in may_differ:
            changed[field.name] = value
    return changed


def _shared(section: Section, *location: str) -> dict[str, Any]:
    """Return the shared fields of a recipe's section that are not at their defaults."""
    known = type(section).model_fields
    return {
        f"{location[-1]}.{name}": value
        for name, value in section
        if OWN not in marks_of((*location, name))
        and _plain(value) != _plain(known[name].default if name in known else None)
    }
