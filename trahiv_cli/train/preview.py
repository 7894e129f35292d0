"""How the data looks to the model: `build_preview` prepares some of it as training would, and reads it.

Nothing is tokenized, cut, packed or masked here: TRL's own trainers and the collators of `assets/` do that,
here as in training. How a preview looks on a screen is `cli/preview.py`'s business.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from trahiv_cli.assets.collators import IGNORED_LABEL, build_collator
from trahiv_cli.assets.data import Splits, build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.assets.samples import TOKENIZED
from trahiv_cli.assets.sources import load_rows
from trahiv_cli.recipe.forms import require_a_batch
from trahiv_cli.recipe.schema import Recipe, section_of
from trahiv_cli.train.preparing import Tell, heeding, preparing, require_trained_tokens, training_arguments

LOOKED_AT = 1000
"""Samples that the figures are taken of: TRL packs as many at a time, and tokenizes them in seconds."""

NO_LIMIT = 2**31 - 1
BINS = 8
"""Most bins of a histogram; samples that are cut have a bin of their own."""

_ROW = "trahiv_row"
"""Column that says of which row TRL made a sample; TRL keeps columns that it does not know."""

_ON_ANY_MACHINE = {"optim": "adamw_torch", "report_to": [], "eval_steps": 0} | dict.fromkeys(
    ("bf16", "fp16", "torch_compile", "activation_checkpointing"), False
)
"""Instead of what a machine may lack that only looks at data."""

Tokens = list[tuple[int, bool]]
"""What the model takes at once: each token's id, and whether it is trained."""


# -- what a preview says --------------------------------------------------------------------------


class Piece(NamedTuple):
    """Some text of a sample: all of it trained or none, and all of it special tokens or none."""

    text: str
    is_trained: bool
    is_special: bool = False


class Part(NamedTuple):
    """A stretch of a sample: all of it, an answer of two, one of several samples in a packed row."""

    name: str  # what the part is, or empty if there is only one
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Bin:
    """How many have from `first` to `last` tokens, both included; without end if `last` is None."""

    first: int
    last: int | None
    count: int


@dataclass(frozen=True)
class Sample:
    """One sample as the model takes it: cut, and with packing a whole row."""

    parts: tuple[Part, ...]
    num_tokens: int
    num_trained: int
    num_cut: int = 0  # tokens that were cut off; of `clm`, `mlm` and `seq-cls` it is not known
    is_left_out: bool = False  # nothing of it is trained once it is cut, so TRL leaves it out

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("text", "trained", "special")
        parts = [
            {"name": name, "pieces": [dict(zip(names, piece, strict=True)) for piece in pieces]}
            for name, pieces in self.parts
        ]
        counts = {"tokens": self.num_tokens, "trained_tokens": self.num_trained, "cut_tokens": self.num_cut}
        return {**counts, "left_out": self.is_left_out, "parts": parts}


@dataclass(frozen=True)
class Preview:
    """Some samples, and figures over those that were looked at."""

    name: str
    task: str
    max_length: int
    setting: str  # the recipe's key of `max_length`: `sft.max_length`
    num_samples: int | None  # in all, for `sft` before packing; unknown of a stream
    samples: tuple[Sample, ...]
    num_looked_at: int

    length_of: str  # what has `lengths`: a `sample`, or a `document` where several become one sample
    lengths: tuple[int, ...]  # tokens before anything is cut or packed; of `dpo` with the longer answer
    num_cut: int | None  # of `lengths`, beyond `max_length`; None where the rest goes into the next row
    num_untrained: int | None  # looked at, train nothing once cut; None if that can't happen or be told

    num_rows: int  # what the model gets of the samples that were looked at: with packing, fewer
    num_tokens: int  # in these rows
    num_trained: int  # of `num_tokens`; none of `seq-cls`, which learns a class for each row
    is_packed: bool
    classes: dict[str, int] = field(default_factory=dict)  # class -> samples of it; for `seq-cls` alone

    @property
    def trained_share(self) -> float:
        """Share of the tokens that the loss is computed on, from 0 to 1."""
        return self.num_trained / self.num_tokens if self.num_tokens else 0.0

    @property
    def packing_efficiency(self) -> float | None:
        """Share of the rows that is filled, from 0 to 1; None without packing."""
        filled = self.is_packed and self.num_rows
        return self.num_tokens / (self.num_rows * self.max_length) if filled else None

    def histogram(self) -> list[Bin]:
        """Count `lengths` in bins as wide as a power of 2; what is cut has a bin of its own, the last."""
        limit = self.max_length if self.num_cut else max(self.lengths, default=0)
        kept = [length for length in self.lengths if length <= limit]
        width = 1
        while max(kept, default=0) > BINS * width:
            width *= 2
        counts = Counter((length - 1) // width for length in kept)
        bins = [
            Bin(number * width + 1, min((number + 1) * width, limit), counts[number])
            for number in range(min(counts, default=0), max(counts, default=-1) + 1)
        ]
        cut = len(self.lengths) - len(kept)
        return [*bins, Bin(limit + 1, None, cut)] if cut else bins

    def to_data(self) -> dict[str, Any]:
        """Return the fields of the `preview` event; null is what is not known or does not apply."""
        efficiency = self.packing_efficiency
        return {
            "name": self.name,
            "task": self.task,
            "max_length": self.max_length,
            "num_samples": self.num_samples,
            "looked_at": self.num_looked_at,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "trained_tokens": None if self.classes else self.num_trained,
            "trained_share": None if self.classes else round(self.trained_share, 4),
            "untrained_samples": self.num_untrained,
            "cut_samples": self.num_cut,
            "packing_efficiency": None if efficiency is None else round(efficiency, 4),
            "classes": self.classes or None,
            "lengths": {
                "of": self.length_of,
                "count": len(self.lengths),
                "shortest": min(self.lengths, default=None),
                "median": statistics.median_low(self.lengths) if self.lengths else None,
                "longest": max(self.lengths, default=None),
                "histogram": [[each.first, each.last, each.count] for each in self.histogram()],
            },
            "samples": [sample.to_data() for sample in self.samples],
        }


# -- how it is made -------------------------------------------------------------------------------


def build_preview(recipe: Recipe, num_shown: int, tell: Tell) -> Preview:
    """Prepare the recipe's data as training would, and look at the first samples; `num_shown` are shown.

    No model is loaded, and nothing is written but the cache of `datasets`. The order is that of a peer whose
    own seed is `training.seed`. That no token is trained is a warning here: a preview is to show why.

    Raises:
        AssetError: the tokenizer or the data can't be had, or do not fit the task.
    """
    tokenizer, seed, section = build_tokenizer(recipe), recipe.training.seed, section_of(recipe.task) or ""
    train = build_datasets(recipe, tokenizer, seed=seed, peer_seed=seed).train
    with heeding(tell):
        look = _of_samples if recipe.sft is None and recipe.dpo is None else _of_trl
        rows, found = look(recipe, tokenizer, train, num_shown, getattr(recipe, section))
    sequences = [sequence for row in rows for sequence in row]
    preview = Preview(
        name=recipe.name,
        task=recipe.task,
        max_length=getattr(recipe, section).max_length,
        setting=f"{section}.max_length",
        num_samples=None if isinstance(train, IterableDataset) else len(train),
        num_rows=len(rows),
        num_tokens=sum(map(len, sequences)),
        num_trained=sum(map(_num_trained, sequences)),
        **found,
    )
    if not preview.num_trained and not preview.classes:
        tell(
            f"None of the {preview.num_looked_at:,} samples trains a token: training would be refused.",
            f"Raise `{preview.setting}` (it is {preview.max_length}), or shorten the prompts.",
        )
    return preview


def require_trainable(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, splits: Splits) -> None:
    """Prepare the first rows as training will, without its model.

    Raises:
        AssetError: there is less than one local batch, or see `require_trained_tokens`.
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


def _num_trained(tokens: Tokens) -> int:
    return sum(is_trained for _, is_trained in tokens)


# -- clm, mlm, seq-cls: samples are tokens already ------------------------------------------------


def _of_samples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Dataset, num_shown: int, section: Any
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
    return [[tokens] for tokens, _ in seen], {
        "samples": tuple(
            Sample(_parts(recipe, tokenizer, tokens, labels), len(tokens), _num_trained(tokens))
            for tokens, labels in seen[:num_shown]
        ),
        "num_looked_at": len(seen),
        "length_of": "document" if is_packed else "sample",
        "lengths": lengths,
        "num_cut": None if is_packed else sum(length > section.max_length for length in lengths),
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
    return _divided(tokenizer, tokens, ends, "document")


def _lengths(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Count the tokens of the first rows, as many of each dataset, before anything is cut or joined."""
    uncut = getattr(recipe, section_of(recipe.task) or "").model_copy(update={"max_length": NO_LIMIT})
    count = max(LOOKED_AT // len(recipe.data.datasets), 1)
    for index, source in enumerate(recipe.data.datasets):
        opened = load_rows(source, f"data.datasets.{index}", streaming=recipe.data.streaming)
        opened = replace(opened, rows=_first(opened.rows, count))
        documents = TOKENIZED[recipe.task](opened, uncut, tokenizer, num_proc=None)
        yield from (len(document["input_ids"]) for document in documents)


# -- sft, dpo: TRL makes samples of rows ----------------------------------------------------------


def _of_trl(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Dataset, num_shown: int, section: Any
) -> tuple[list[list[Tokens]], dict[str, Any]]:
    """Look at what TRL makes of the first rows: as training will have them, and, for the lengths, uncut."""
    is_packed = recipe.sft is not None and recipe.sft.packing
    is_joined = is_packed and section.packing_strategy != "bfd"
    rows = _first(train, LOOKED_AT)
    rows = rows.add_column(_ROW, range(len(rows)))
    trainer = _trl_trainer(recipe, tokenizer, rows)
    uncut = _trl_trainer(recipe, tokenizer, rows, is_cut=False)
    whole = [_read(recipe, uncut.data_collator, sample) for sample in uncut.train_dataset]
    cut = [[sequence[: section.max_length] for sequence in sequences] for sequences in whole]
    lengths = tuple(max(map(len, sequences)) for sequences in whole)
    seen = [_read(recipe, trainer.data_collator, sample) for sample in trainer.train_dataset]
    shown = []
    for sample, sequences in islice(zip(trainer.train_dataset, seen, strict=True), num_shown):
        length = 0 if is_packed else lengths[sample[_ROW]]
        shown.append(_shown(tokenizer, sequences, length, sample.get("seq_lengths") or ()))
    if not seen:  # TRL left all of them out: then these are what is to be seen
        left_out = (_shown(tokenizer, *one) for one in islice(zip(cut, lengths, strict=True), num_shown))
        shown = [replace(sample, is_left_out=True) for sample in left_out]
    untrained = sum(not all(map(_num_trained, sequences)) for sequences in cut)
    return seen, {
        "samples": tuple(shown),
        "num_looked_at": len(rows),
        "length_of": "sample",
        "lengths": lengths,
        "num_cut": None if is_joined else sum(length > section.max_length for length in lengths),
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
    tokenizer: PreTrainedTokenizerBase, sequences: list[Tokens], length: int, packed: Sequence[int] = ()
) -> Sample:
    if len(sequences) == 1:
        parts = _divided(tokenizer, sequences[0], list(accumulate(packed)), "sample")
    else:
        chosen, rejected = (pieces_of(tokenizer, sequence) for sequence in sequences)
        named = {"prompt": (chosen, False), "chosen": (chosen, True), "rejected": (rejected, True)}
        parts = tuple(
            Part(name, tuple(piece for piece in pieces if piece.is_trained is wanted))
            for name, (pieces, wanted) in named.items()
        )
    cut = max(length - max(map(len, sequences)), 0)
    return Sample(parts, sum(map(len, sequences)), sum(map(_num_trained, sequences)), cut)


# -- from tokens to text --------------------------------------------------------------------------


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> tuple[Piece, ...]:
    """Decode tokens in runs that are trained or not, special or not; together they are the whole text.

    A token alone may be a part of a character, or lose the space before it. So what a run says begins where
    all up to it, decoded at once, stops to be a prefix of the whole. A split character is the later run's.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)

    def decoded(some: Tokens) -> str:
        ids = [number for number, _ in some]
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text, pieces, start, end = decoded(tokens), [], 0, 0
    for kind, run in groupby((is_trained, number in special) for number, is_trained in tokens):
        end += len(list(run))
        stop = len(text)
        if end < len(tokens):
            stop = max(start, len(os.path.commonprefix([decoded(tokens[:end]), text])))
        if stop > start:
            pieces.append(Piece(text[start:stop], *kind))
        start = stop
    return tuple(pieces)


def _divided(
    tokenizer: PreTrainedTokenizerBase, tokens: Tokens, ends: Sequence[int], what: str
) -> tuple[Part, ...]:
    """Decode tokens in parts up to each of `ends`: `what 1`, `what 2`, ...; nameless if it is only one."""
    bounds = sorted({0, *ends, len(tokens)})
    parts = [pieces_of(tokenizer, tokens[first:last]) for first, last in pairwise(bounds)]
    return tuple(Part(f"{what} {n}" if len(parts) > 1 else "", pieces) for n, pieces in enumerate(parts, 1))
