"""Write a trained model to a folder for `from_pretrained` or peft, and generate a sample of its text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError

from trahiv_cli.assets.hub import is_of_hub
from trahiv_cli.assets.samples import TEMPLATE_FAILURES
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.agreement import AgreedRun
from trahiv_cli.recipe.rows import texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


def write_final(
    model: PreTrainedModel, reader: PreTrainedTokenizerBase | ProcessorMixin, folder: Path, card: str
) -> None:
    """Write model, tokenizer and card into `folder`, replacing its content, all or nothing.

    The `reader` is the tokenizer, or a processor that has it. The model is saved as safetensors in its own
    dtypes. For a `PeftModel`, only the adapters are saved, with the generation config of its base.

    Raises:
        SetupError: the disk is full or the folder not writable; `folder` is unchanged.
    """
    from peft import PeftModel

    # By default peft asks the hub whether the vocabulary was resized; trahiv never resizes it.
    options = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
    try:
        with replacing(folder) as new:
            model.save_pretrained(new, **options)
            if model.can_generate():
                model.generation_config.save_pretrained(new)
            reader.save_pretrained(new)
            (new / "README.md").write_text(card, encoding="utf-8")
    except OSError as failure:
        raise SetupError(
            f"The model could not be written to {str(folder)!r}: {failure}. The old content is unchanged.",
            "Free disk space, or choose another --output-dir.",
        ) from failure


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill, flush it to the disk, and rename it to `folder`, replacing the old one.

    A crash between the two renames leaves both whole, in `.<name>.new` and `.<name>.old`.

    Raises:
        OSError: the disk is full or read-only, also if safetensors reports it; `folder` is unchanged.
    """
    new, old = (folder.with_name(f".{folder.name}.{which}") for which in ("new", "old"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for path in (*new.rglob("*"), new):
            sync(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as failure:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(str(failure)) from failure


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def model_card(run: AgreedRun, *, samples: int, peers: int) -> str:
    """Compose the README.md of a trained model: front matter for the hub, then a summary of the run.

    `samples` counts the samples of the whole swarm, `peers` is the most that took part in one step. The card
    names the base model and the datasets if they are on the hub.
    """
    from huggingface_hub import ModelCardData

    recipe = run.recipe
    base = recipe.model.model_name_or_path
    has_adapters = recipe.peft is not None
    datasets = [source.path for source in recipe.data.datasets if is_of_hub(source.path)]
    front = ModelCardData(
        library_name="peft" if has_adapters else "transformers",
        base_model=base if is_of_hub(base) else None,
        datasets=datasets or None,
        tags=["trahiv", "hivemind", *["lora"] * has_adapters],
    )
    origin = f"Fine-tuned from `{base}`" if is_of_hub(base) else "Trained"
    return f"""---
{front.to_yaml()}
---

# {recipe.name}

{origin} by a swarm of peers over the internet with trahiv.

| | |
|---|---|
| run | `{run.run_id}` |
| agreement | `{run.fingerprint}` |
| steps | {recipe.training.max_steps:,} |
| samples | {samples:,} |
| most peers in one step | {peers} |
| holds | {"LoRA adapters (float32)" if has_adapters else "the full model"} |
"""


class Prompt(NamedTuple):
    """The tokens that a model continues."""

    ids: list[int]
    text: str  # for people; for a conversation, its last message
    is_reply: bool = False  # whether they end where the assistant's answer begins
    more: Mapping[str, torch.Tensor] = MappingProxyType({})  # further inputs of a model that sees pictures


def open_turn(
    reader: PreTrainedTokenizerBase | ProcessorMixin, row: Mapping[str, Any], max_tokens: int
) -> Prompt | None:
    """Write a row's conversation up to its last answer, which the model is to give.

    The `reader` is the tokenizer, or a processor that reads the row's pictures, too. Without pictures, only
    the last `max_tokens` tokens are returned. None: the row has no conversation, no message before the
    answer, or only messages that the template refuses.
    """
    messages = row.get("messages") or row.get("prompt") or row.get("chosen")
    if not isinstance(messages, list):
        return None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    options = row.get("chat_template_kwargs") or {}
    if hasattr(reader, "image_processor"):
        return _open_turn_with_pictures(reader, row, messages, options)
    write = partial(reader.apply_chat_template, tokenize=False, **options)
    try:
        opened = write(messages, add_generation_prompt=True)
        if opened == write(messages):  # the template ignores that option
            answer = "(answer)"  # it shows where the template writes an answer
            opened = write([*messages, {"role": "assistant", "content": answer}]).partition(answer)[0]
    except TEMPLATE_FAILURES:
        return None
    ids = reader(opened, add_special_tokens=False)["input_ids"]
    return Prompt(ids[-max_tokens:], "".join(texts_of(messages[-1])), is_reply=True)


def _open_turn_with_pictures(
    processor: Any, row: Mapping[str, Any], messages: list[dict[str, Any]], options: dict[str, Any]
) -> Prompt | None:
    from trl.data_utils import prepare_multimodal_messages

    pictures = row.get("images") or [row[name] for name in ("image",) if row.get(name)]
    try:
        shown = prepare_multimodal_messages(messages, pictures)
        read = processor.apply_chat_template(
            shown, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **options
        )
    except TEMPLATE_FAILURES:
        return None
    more = {name: value for name, value in read.items() if name not in ("input_ids", "attention_mask")}
    ids = read["input_ids"][0].tolist()
    return Prompt(ids, "".join(texts_of(messages[-1])), is_reply=True, more=more)


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    max_new_tokens: int,
    seed: int,
) -> str:
    """Generate text that continues the prompt, and return only the new text.

    The model's train or eval mode and torch's generators are left unchanged. The same seed and weights give
    the same text on one kind of processor. Without tokens in the prompt, the text begins a new document.
    """
    start = torch.tensor([prompt.ids or [tokenizer.eos_token_id]], device=model.device)
    # A padded vocabulary: the model has scores for tokens that the tokenizer can't decode.
    padding = range(len(tokenizer), model.config.get_text_config().vocab_size)
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            written = model.generate(
                input_ids=start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                temperature=0.7,  # below 1, the text of an early model is easier to read
                max_new_tokens=max_new_tokens,
                suppress_tokens=[*padding] or None,
                pad_token_id=tokenizer.pad_token_id,
                **{name: value.to(model.device) for name, value in prompt.more.items()},
            )
    finally:
        model.train(was_training)
    return str(tokenizer.decode(written[0, start.shape[1] :], skip_special_tokens=True))
