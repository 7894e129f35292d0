"""A rehearsal of training and saving before others are invited, so that mistakes harm no other peer.

1. The optimizer and its schedule are made. The optimizer takes a step with placeholders of a few values.
2. Real samples run forward and backward. Packed samples must not attend to each other.
3. The tokenizer and the configs of `final/` are saved and loaded.

The trainer, the model's weights and all generators are left unchanged. A run that resumes rehearses, too: it
costs one batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from trahiv_cli.assets.collators import IGNORED_LABEL
from trahiv_cli.assets.memory import checkpoint_activations, is_out_of_memory
from trahiv_cli.errors import AssetError, TrahivError
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train.checkpoint import random_states, set_random_states


def rehearse(trainer: Any, recipe: Recipe, events: Events) -> None:
    """Rehearse training and saving with the `trainer`, a `SwarmTrainerMixin`.

    It may correct the model's generation config, which then lists the tokens that end a turn.

    Raises:
        AssetError: the model, the data or their combination can't work; nothing was trained.
        RecipeError, SetupError: see `SwarmTrainerMixin.plan_run`.
        OutOfMemory: not even one sample fits into memory.
    """
    with left_as_it_was(trainer), attempting("A batch could not be trained"):
        trainer.plan_run()
        # They are searched for tokens that end a turn; the longest of them are rehearsed.
        samples = list(islice(iter(trainer.train_dataset), 64))
        longest = sorted(samples, key=lambda sample: len(str(sample)))
        if recipe.grpo is not None:  # as many completions as training generates at once
            rehearse_batch(trainer, longest[-1:] * trainer.args.generation_batch_size)
        else:
            rehearse_batch(trainer, longest[-min(2, trainer.args.per_device_train_batch_size) :])
        if recipe.clm is not None or (recipe.sft is not None and "input_ids" in samples[0]):
            require_blind(trainer, recipe, samples)
    has_adapters = recipe.peft is not None
    base = trainer.plain_model.get_base_model() if has_adapters else trainer.plain_model
    with attempting("The model could not be saved"):
        if base.can_generate():
            correct_generation(base, events)
            if recipe.clm is None and recipe.grpo is None:
                teach_end(trainer, base, samples, events)
        rehearse_saving(base, trainer.processing_class, is_whole=not has_adapters)


@contextmanager
def attempting(failed: str) -> Iterator[None]:
    """Turn a library's exception into an `AssetError` that begins with `failed`, unless memory ran out."""
    try:
        yield
    except TrahivError:
        raise
    except Exception as failure:  # noqa: BLE001 - whatever a library raises is about the model or the data
        if is_out_of_memory(failure):
            raise
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        raise AssetError(
            f"{failed} in the rehearsal: {reason}. Nothing was trained.",
            "Check the sections `model`, `data` and `training`.",
        ) from failure


@contextmanager
def left_as_it_was(trainer: Any) -> Iterator[None]:
    """Restore gradients, buffers, generators, the mode and the trainer's figures after the block."""
    model = trainer.model
    was_training = model.training
    attributes = dict(vars(trainer))
    states = random_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        model.train(was_training)
        for buffer, value in buffers:
            buffer.data.copy_(value)
        model.zero_grad()
        vars(trainer).update(attributes)
        for figures in getattr(trainer, "_metrics", {}).values():  # an attribute of TRL's trainers
            figures.clear()
        set_random_states(states)
        clear_device_cache(garbage_collection=True)


def rehearse_batch(trainer: Any, samples: list[Any]) -> None:
    """Run samples forward and backward as training does, or only the first if memory runs out."""
    model = trainer.model.train()
    vars(trainer).update(current_gradient_accumulation_steps=1)  # the Trainer sets it before each batch
    if getattr(trainer.args, "activation_checkpointing", trainer.args.gradient_checkpointing):
        checkpoint_activations(model)
    try:
        inputs = trainer._prepare_inputs(trainer.data_collator([*map(dict, samples)]))
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
        return
    except (RuntimeError, MemoryError) as failure:
        # A generation of completions is one sample, repeated: it can't be smaller.
        if not is_out_of_memory(failure) or samples[0] is samples[-1]:
            raise
    rehearse_batch(trainer, samples[:1])


def require_blind(trainer: Any, recipe: Recipe, rows: list[Any]) -> None:
    """Raise `AssetError` if a token's logits depend on later tokens, or on another sample in the row."""
    kind = trainer.plain_model.config.model_type
    reach = 128  # most tokens on either side of a border: logits of a long sample need much memory
    if sees(trainer, excerpt(rows[0], 0, 2 * reach), slice(-1, None), slice(-1)):
        raise AssetError(
            f"As this model ({kind}) is set, it sees the tokens that it is to predict.",
            "Set `is_decoder: true` in its config, or choose a causal model.",
        )
    if recipe.sft is None or not recipe.sft.sees_borders:
        return
    for row in rows:
        if len(row["seq_lengths"]) > 1:
            border = row["seq_lengths"][0]
            start = max(0, border - reach)
            near = excerpt(row, start, border + reach)
            if sees(trainer, near, slice(border - start), slice(border - start, None)):
                raise AssetError(
                    f"Packed samples would see each other: models of type {kind!r} have no borders for them.",
                    "Set `sft.packing: false`, or `packing_strategy: wrapped` if they may.",
                )
            return


def excerpt(row: Any, start: int, stop: int) -> dict[str, Any]:
    """Return the tokens from `start` to `stop` of a row, with all other values of each token."""
    length = len(row["input_ids"])
    cut = {name: value[start:stop] for name, value in row.items() if len(value) == length}
    if "seq_lengths" in row:
        ends = list(accumulate(row["seq_lengths"]))
        sizes = [min(end, stop) - max(begin, start) for begin, end in pairwise([0, *ends])]
        cut["seq_lengths"] = [size for size in sizes if size > 0]
    return cut


@torch.no_grad()
def sees(trainer: Any, row: Any, changed: slice, looked_at: slice) -> bool:
    """Return whether the logits at `looked_at` depend on the tokens of a sample at `changed`."""
    model = trainer.model.eval()
    inputs = trainer._prepare_inputs(trainer.data_collator([row])) | {"use_cache": False}
    del inputs["labels"]
    other = inputs["input_ids"].clone()
    other[:, changed] = (other[:, changed] + 1) % model.config.get_text_config().vocab_size
    with trainer.accelerator.autocast():
        before = model(**inputs).logits[:, looked_at]
        after = model(**inputs | {"input_ids": other}).logits[:, looked_at]
    # In float32 with random weights, models that keep samples apart gave a share of at most 1e-7, other
    # models at least 2e-4.
    share = max(1e-4, 4 * torch.finfo(before.dtype).eps)
    return bool((before - after).abs().max() > share * before.abs().max())


def correct_generation(base: Any, events: Events) -> None:
    """Replace a generation config that can't be saved by one with only its tokens, and warn about it."""
    try:
        base.generation_config.validate(strict=True)
    except ValueError as failure:
        fields = base.generation_config.to_dict().items()
        tokens = {name: value for name, value in fields if name.endswith("token_id")}
        base.generation_config = GenerationConfig(**tokens)
        reason = " ".join(str(failure).split())[:300]
        events.warn(
            "generation",
            f"The model's generation config can't be saved; final/ gets its tokens alone. {reason}",
            hint="nothing to do, or correct generation_config.json",
        )


def teach_end(trainer: Any, base: Any, samples: list[Any], events: Events) -> None:
    """Add the special token that ends the trained part of most samples to the generation config's end tokens.

    Whitespace after it does not count. Warn if no sample trains such a token: the model would learn no end.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends: list[int] = []
    for sample in samples:
        batch = trainer.data_collator([dict(sample)])
        trained = batch["labels"] != IGNORED_LABEL if "labels" in batch else batch["completion_mask"].bool()
        words = [one for one in batch["input_ids"][trained].tolist() if tokenizer.decode([one]).strip()]
        ends += special.intersection(words[-1:])
    if not ends:
        events.warn(
            "no-end",
            "No sample trains a token that ends an answer: the model does not learn to end one.",
            hint="raise max_length, or end turns with a special token (`data.chat_template`)",
        )
        return
    known = base.generation_config.eos_token_id
    tokens = [*(known if isinstance(known, list) else [known]), max(ends, key=ends.count)]
    base.generation_config.update(eos_token_id=[one for one in dict.fromkeys(tokens) if one is not None])


def rehearse_saving(
    base: Any, processing_class: PreTrainedTokenizerBase | ProcessorMixin, *, is_whole: bool
) -> None:
    """Save and load all of `final/` except the weights; if `is_whole`, check that these can be saved, too."""
    with tempfile.TemporaryDirectory() as folder:
        base.config.save_pretrained(folder)
        AutoConfig.from_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)
            GenerationConfig.from_pretrained(folder)
        processing_class.save_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        if isinstance(processing_class, ProcessorMixin):
            AutoProcessor.from_pretrained(folder)
        if is_whole:
            remove_tied_weights_from_state_dict(base.state_dict(), base)
