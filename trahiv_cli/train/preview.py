"""How the data looks to the model: `build_preview` prepares some of it as training would, and reads it.

Nothing is tokenized, cut, packed or masked here: TRL's own trainers and the collators of `assets/` do that,
here as in training. How a preview looks on a screen is `cli/preview.py`'s business.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from trahiv_cli.assets.collators import IGNORED_LABEL, build_collator
from trahiv_cli.assets.data import Splits, build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.assets.samples import classified, clm_documents, mlm_documents
from trahiv_cli.assets.sources import load_rows
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.recipe.schema import Recipe, section_of
from trahiv_cli.train.arguments import training_arguments
from trahiv_cli.train.preparing import Tell, heeding, preparing, require_trained_tokens
from trahiv_cli.train.seen import Part, Piece, Preview, Sample, Tokens, num_trained, parts_of, pieces_of

LOOKED_AT = 1000
"""Samples that the figures are taken of: TRL packs as many at a time, and tokenizes them in seconds."""

NO_LIMIT = 2**31 - 1

_ROW = "trahiv_row"
"""Column that says of which row TRL made a sample; TRL keeps columns that it does not know."""

_ON_ANY_MACHINE = {
    "bf16": False,
    "fp16": False,
    "torch_compile": False,
    "activation_checkpointing": False,
    "optim": "adamw_torch",
    "report_to": [],
    "eval_steps": 0,
}
"""Instead of what a machine may lack that only looks at data."""


def build_preview(recipe: Recipe, num_shown: int, tell: Tell) -> Preview:
    """Prepare the recipe's data as training would, and look at the first samples.

    No model is loaded, and nothing is written but the cache of `datasets`. Samples come in the order of a
    peer whose own seed is `training.seed`; `num_shown` of them are shown, with packing rows. That no token is
    trained is a warning here: a preview is to show why.

    Raises:
        AssetError: the tokenizer or the data can't be had, or do not fit the task.
    """
    tokenizer, seed, section = build_tokenizer(recipe), recipe.training.seed, section_of(recipe.task) or ""
    train = build_datasets(recipe, tokenizer, seed=seed, peer_seed=seed).train
    with heeding(tell):
        look = _of_samples if recipe.sft is None and recipe.dpo is None else _of_trl
        rows, found = look(recipe, tokenizer, train, num_shown)
    sequences = [sequence for row in rows for sequence in row]
    preview = Preview(
        name=recipe.name,
        task=recipe.task,
        max_length=getattr(recipe, section).max_length,
        setting=f"{section}.max_length",
        num_samples=None if isinstance(train, IterableDataset) else len(train),
        num_rows=len(rows),
        num_tokens=sum(map(len, sequences)),
        num_trained=sum(map(num_trained, sequences)),
        **found,
    )
    if not preview.num_trained and not preview.classes:
        tell(
            f"None of the {preview.num_looked_at:,} samples trains a token: training would be refused.",
            f"Raise `{preview.setting}` (it is {preview.max_length}), or shorten the prompts.",
        )
    return preview


def require_trainable(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, splits: Splits) -> None:
    """Prepare the first rows as training will, without its model, and refuse data that can't be trained.

    Raises:
        AssetError: there is less than one local batch, a row can't be written with the chat template, or the
            first samples train no token.
    """
    train, sft, training = splits.train, recipe.sft, recipe.training
    if isinstance(train, Dataset) and (sft is None or not sft.packing):
        local = training.per_device_train_batch_size * training.gradient_accumulation_steps
        require_a_batch(len(train), local)
    if sft is not None or recipe.dpo is not None:
        train = _trl_trainer(recipe, tokenizer, _first(train, LOOKED_AT)).train_dataset
    require_trained_tokens(recipe, train)


def _first(rows: Dataset | IterableDataset, count: int) -> Dataset:
    """Take some rows into memory, so that what is made of them is neither cached nor taken from a cache."""
    return Dataset.from_list(list(islice(rows, count)), features=rows.features)


# -- clm, mlm, seq-cls: samples are tokens already ------------------------------------------------


def _of_samples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Dataset | IterableDataset, num_shown: int
) -> tuple[list[list[Tokens]], dict[str, Any]]:
    """Look at the first samples: return each row that the model gets, and fields of the preview."""
    torch.manual_seed(recipe.training.seed)  # draws what `mlm` hides
    collate = build_collator(recipe, tokenizer)
    assert collate is not None
    seen: list[tuple[Tokens, Any]] = []
    for sample in islice(train, LOOKED_AT):
        batch = {name: tensor[0].tolist() for name, tensor in collate([sample]).items()}
        ids, labels = batch["input_ids"], batch["labels"]
        tokens = [(token, False) for token in ids]
        if recipe.seq_cls is None:
            tokens = [(token, label != IGNORED_LABEL) for token, label in zip(ids, labels, strict=True)]
        if recipe.clm is not None:
            tokens[0] = ids[0], False  # nobody's next one
        seen.append((tokens, labels))
    classes = {}
    if recipe.seq_cls is not None:
        counts = Counter(label for _, label in seen)
        classes = {name: counts[number] for number, name in enumerate(recipe.seq_cls.labels)}
    is_packed, lengths = recipe.clm is not None and recipe.clm.packing, tuple(_lengths(recipe, tokenizer))
    max_length = getattr(recipe, section_of(recipe.task) or "").max_length
    return [[tokens] for tokens, _ in seen], {
        "samples": tuple(
            Sample(_parts(recipe, tokenizer, tokens, labels), len(tokens), num_trained(tokens))
            for tokens, labels in seen[:num_shown]
        ),
        "num_looked_at": len(seen),
        "length_of": "document" if is_packed else "sample",
        "lengths": lengths,
        "num_cut": None if is_packed else sum(length > max_length for length in lengths),
        "num_untrained": None,
        "is_packed": is_packed,
        "classes": classes,
    }


def _parts(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tokens: Tokens, labels: Any
) -> tuple[Part, ...]:
    if recipe.seq_cls is not None:
        of_class = Piece(recipe.seq_cls.labels[labels], is_trained=True)
        return Part("text", pieces_of(tokenizer, tokens)), Part("class", (of_class,))
    if recipe.mlm is not None:
        pairs = zip(tokens, labels, strict=True)
        whole = [(label if is_hidden else token, is_hidden) for (token, is_hidden), label in pairs]
        hidden = Part("the model sees", pieces_of(tokenizer, tokens))
        return hidden, Part("and is to guess", pieces_of(tokenizer, whole))
    ends = [number for number, (token, _) in enumerate(tokens, 1) if token == tokenizer.eos_token_id]
    return parts_of(tokenizer, tokens, ends, "document")


def _lengths(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Count the tokens of the first rows, as many of each dataset, before anything is cut or joined."""
    uncut, count = {"max_length": NO_LIMIT}, max(LOOKED_AT // len(recipe.data.datasets), 1)
    for index, source in enumerate(recipe.data.datasets):
        opened = load_rows(source, f"data.datasets.{index}", streaming=recipe.data.streaming)
        opened = replace(opened, rows=_first(opened.rows, count))
        if recipe.clm is not None:
            documents = clm_documents(opened, recipe.clm, tokenizer, num_proc=None)
        elif recipe.mlm is not None:
            documents = mlm_documents(opened, recipe.mlm.model_copy(update=uncut), tokenizer, num_proc=None)
        else:
            assert recipe.seq_cls is not None
            documents = classified(opened, recipe.seq_cls.model_copy(update=uncut), tokenizer, num_proc=None)
        yield from (len(document["input_ids"]) for document in documents)


# -- sft, dpo: TRL makes samples of rows ----------------------------------------------------------


def _of_trl(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Dataset | IterableDataset, num_shown: int
) -> tuple[list[list[Tokens]], dict[str, Any]]:
    """Look at what TRL makes of the first rows: as training will have them, and, for the lengths, uncut."""
    max_length = getattr(recipe, section_of(recipe.task) or "").max_length
    is_packed = recipe.sft is not None and recipe.sft.packing
    is_joined = is_packed and recipe.sft is not None and recipe.sft.packing_strategy != "bfd"
    rows = _first(train, LOOKED_AT)
    rows = rows.add_column(_ROW, range(len(rows)))
    trainer = _trl_trainer(recipe, tokenizer, rows)
    uncut = _trl_trainer(recipe, tokenizer, rows, is_cut=False)
    whole = [_read(recipe, uncut.data_collator, sample) for sample in uncut.train_dataset]
    cut = [[sequence[:max_length] for sequence in sequences] for sequences in whole]
    lengths = tuple(max(map(len, sequences)) for sequences in whole)
    seen = [_read(recipe, trainer.data_collator, sample) for sample in trainer.train_dataset]
    shown = []
    for sample, sequences in islice(zip(trainer.train_dataset, seen, strict=True), num_shown):
        length = 0 if is_packed else lengths[sample[_ROW]]
        shown.append(_shown(tokenizer, sequences, length, sample.get("seq_lengths")))
    if not seen:  # TRL left all of them out: then these are what is to be seen
        left_out = (_shown(tokenizer, *one) for one in islice(zip(cut, lengths, strict=True), num_shown))
        shown = [replace(sample, is_left_out=True) for sample in left_out]
    untrained = sum(not all(map(num_trained, sequences)) for sequences in cut)
    return seen, {
        "samples": tuple(shown),
        "num_looked_at": len(rows),
        "length_of": "sample",
        "lengths": lengths,
        "num_cut": None if is_joined else sum(length > max_length for length in lengths),
        "num_untrained": None if is_joined else untrained,
        "is_packed": is_packed,
    }


def _trl_trainer(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: Dataset, *, is_cut: bool = True
) -> Any:
    """Make TRL's trainer of `rows` with the smallest of models; if not `is_cut`, samples stay whole."""
    from trl import DPOTrainer, SFTTrainer

    training = recipe.training.model_copy(update=_ON_ANY_MACHINE)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size, **tokens))
    with tempfile.TemporaryDirectory() as folder, preparing():
        args: Any = training_arguments(recipe.model_copy(update={"training": training}), Path(folder))
        args.dataset_num_proc = None  # so few rows are not worth a process
        if not is_cut:
            args.max_length, args.packing = None, False
        common = {"args": args, "train_dataset": rows, "processing_class": tokenizer}
        if recipe.sft is not None:
            return SFTTrainer(model, **common)
        return DPOTrainer(model, copy.deepcopy(model), **common)


def _read(recipe: Recipe, collate: Any, sample: dict[str, Any]) -> list[Tokens]:
    """Read a sample through TRL's collator, which cuts and masks too: of `dpo` the prompt with each answer.

    The first token is never trained: it is nobody's next one.
    """
    batch = collate([sample])
    lengths = batch["attention_mask"].sum(dim=1).tolist() if recipe.sft is None else [None]
    trained = batch["completion_mask"].bool() if recipe.sft is None else batch["labels"] != IGNORED_LABEL
    trained[:, 0] = False
    rows = zip(batch["input_ids"].tolist(), trained.tolist(), lengths, strict=True)
    return [list(zip(ids, mask, strict=True))[:length] for ids, mask, length in rows]


def _shown(
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[Tokens],
    length: int,
    seq_lengths: list[int] | None = None,
) -> Sample:
    if len(sequences) == 1:
        parts = parts_of(tokenizer, sequences[0], list(accumulate(seq_lengths or ())), "sample")
    else:
        chosen, rejected = (pieces_of(tokenizer, sequence) for sequence in sequences)
        named = {"prompt": (chosen, False), "chosen": (chosen, True), "rejected": (rejected, True)}
        parts = tuple(
            Part(name, tuple(piece for piece in pieces if piece.is_trained is wanted))
            for name, (pieces, wanted) in named.items()
        )
    cut = max(length - max(map(len, sequences)), 0)
    return Sample(parts, sum(map(len, sequences)), sum(map(num_trained, sequences)), cut)
