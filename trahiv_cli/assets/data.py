"""Training and evaluation data: the mixture of datasets, the held-out share, and an order for each peer.

`sources.py` reads rows, and `samples.py` turns them into samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any

from datasets import (
    Dataset,
    Features,
    IterableDataset,
    LargeList,
    List,
    Value,
    concatenate_datasets,
    disable_progress_bars,
)
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trahiv_cli.assets.pictures import build_processor, has_pictures
from trahiv_cli.assets.samples import (
    classified,
    clm_documents,
    clm_samples,
    mlm_documents,
    tell_left_out,
    trl_rows,
)
from trahiv_cli.assets.sources import Documents, Opened, load_rows, unreadable
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.forms import num_held_out
from trahiv_cli.recipe.schema import Recipe

MOST_SHARDS = 256
"""More files than this are divided into groups: each shard leaves up to one block of tokens unread."""


@dataclass(frozen=True)
class Splits:
    """The samples for training and for evaluation (None without a held-out share), and the tokenizer.

    A sample of `clm` and `mlm` is `{"input_ids": [int, ...]}`, of `seq-cls` `{"input_ids": [int, ...],
    "labels": int}`, of TRL's tasks a raw row, which TRL tokenizes. A stream raises `AssetError` at a row that
    does not fit.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None = None
    """Reads pictures, and has the tokenizer; None if the data has no pictures."""

    @property
    def processing_class(self) -> PreTrainedTokenizerBase | ProcessorMixin:
        """Whatever turns a row into the model's input."""
        return self.processor or self.tokenizer


def build_datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, peer_seed: int) -> Splits:
    """Read, mix, tokenize, hold out and shuffle the recipe's datasets.

    Local and hub data are tokenized into the cache of `datasets`; the built-in text stays in memory; a
    stream is tokenized while it is read. The recipe's seed, which all peers share, selects the held-out
    documents; `peer_seed` determines the order of this peer's training samples.

    Raises:
        AssetError: a dataset cannot be opened, does not fit the task or the others, or is too small.
    """
    disable_progress_bars()
    data = recipe.data
    rows = [
        load_rows(one, f"data.datasets.{index}", streaming=data.streaming, num_proc=data.num_proc)
        for index, one in enumerate(data.datasets)
    ]
    opened = shares_of(rows)
    train = mixed(opened, [prepared(part, recipe, tokenizer) for part in opened])
    held_out = None
    if data.eval.test_split_size:  # by document, before blocks are cut: no text is on both sides
        num_taken = num_held_out(len(train), data.eval.test_split_size)
        drawn = train.shuffle(seed=recipe.training.seed, keep_in_memory=True)
        train = drawn.skip(num_taken)
        held_out = drawn.take(num_taken)
    # Data that peers divide is shuffled in `train/division.py`, in an order that all peers share.
    is_divided = recipe.swarm.divide_data and is_divisible(train, recipe.training.dataloader_num_workers)
    is_shuffled = data.shuffle and not (is_divided and recipe.shuffles_passes)
    seed = recipe.training.seed if is_divided else peer_seed
    is_stream = isinstance(train, IterableDataset)
    if is_shuffled and is_stream:
        # Files are mixed before blocks are packed: packing continues from one document to the next, so it
        # needs one stream, and not one stream for each file. A file is read in chunks of 10 MB at most.
        train = shuffled_stream(train, seed, num_samples=1, num_files=10)
    if recipe.clm is not None:
        train = clm_samples(train, recipe.clm)
        held_out = None if held_out is None else clm_samples(held_out, recipe.clm, "held-out ")
    if is_shuffled:  # samples, not documents: peers that read one long file must not be at the same position
        if is_stream:
            train = shuffled_stream(train, seed)
        else:
            train = train.shuffle(seed=seed, keep_in_memory=True)
    sees = recipe.sft is not None and has_pictures(train)
    return Splits(train, held_out, tokenizer, build_processor(recipe, tokenizer) if sees else None)


def shuffled_stream(
    stream: IterableDataset, seed: int, *, num_samples: int = 1000, num_files: int = 1
) -> IterableDataset:
    """Shuffle a stream's files, and its samples in a buffer.

    The buffer holds `num_samples`, read from `num_files` at a time; 1,000 blocks of 1,024 tokens take about
    40 MB. Before its version 5, `datasets` fills the buffer from one file at a time.
    """
    more: dict[str, int] = {}
    if "max_buffer_input_shards" in inspect.signature(stream.shuffle).parameters:
        more["max_buffer_input_shards"] = num_files
    return stream.shuffle(seed=seed, buffer_size=num_samples, **more)


def is_divisible(samples: Any, num_workers: int) -> bool:
    """Tell whether peers can divide the data: sized samples, or a stream of shards without workers."""
    is_stream = isinstance(samples, IterableDataset)
    return shards_of(samples) > 1 and num_workers == 0 if is_stream else isinstance(samples, Sized)


def shards_of(stream: IterableDataset) -> int:
    """Return the number of shards of a stream: its files, or groups of files if there are many."""
    return min(int(stream.num_shards), MOST_SHARDS)


def prepared(opened: Opened, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Turn each row into a unit that can be held out: a document of tokens, or the row as TRL reads it."""
    try:
        if recipe.clm is not None:
            documents = clm_documents(opened, recipe.clm, tokenizer)
        elif recipe.mlm is not None:
            documents = mlm_documents(opened, recipe.mlm, tokenizer)
        elif recipe.seq_cls is not None:
            documents = classified(opened, recipe.seq_cls, tokenizer)
        else:
            return trl_rows(opened, recipe, tokenizer)
        if next(iter(documents), None) is not None:
            tell_left_out(opened.rows, documents, f"rows of {opened.name} have nothing to learn from")
            return documents
    except UnicodeDecodeError as failure:  # the JSON reader of datasets 5.2 accepts bytes that are not UTF-8
        raise unreadable(opened.source, failure) from failure
    raise AssetError(f"No row of {opened.name} has a text.", "Look at the file, and at its text column.")


def shares_of(opened: list[Opened]) -> list[Opened]:
    """Keep the first rows of each dataset by `fraction`, as `trl.scripts.utils.get_dataset` of TRL 1.16."""
    fractions = [part.source.fraction for part in opened if part.source.fraction is not None]
    if not fractions:  # the schema requires that all have one or none has
        return opened
    weights = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part.rows) / weight for part, weight in zip(opened, weights, strict=True))
    shares = []
    for part, weight in zip(opened, weights, strict=True):
        num_rows = round(weight * total)
        if num_rows == 0:
            raise AssetError(
                f"A share of {part.source.fraction:g} of the mixture is less than one row of {part.name}.",
                f"Raise `{part.place}.fraction`, or remove the dataset.",
            )
        shares.append(replace(part, rows=part.rows.select(range(num_rows))))
    return shares


def mixed(opened: list[Opened], parts: list[Documents]) -> Documents:
    """Concatenate the datasets; their columns must agree."""
    if len(parts) == 1:
        return parts[0]
    # A stream may have no features. They are inferred then from 5 rows, as `datasets` does when it
    # concatenates.
    features = [part.features or Dataset.from_list(list(part.take(5))).features for part in parts]
    kinds = [narrowed(feature) for feature in features]
    for part, kind in zip(opened[1:], kinds[1:], strict=True):
        for column in {**kinds[0], **kind}:
            ours = kinds[0].get(column, "missing")
            theirs = kind.get(column, "missing")
            if ours != theirs and Value("null") not in (ours, theirs):
                raise AssetError(
                    f"The datasets {opened[0].name} and {part.name} cannot be mixed: the column {column!r} "
                    f"is {ours} in the one and {theirs} in the other.",
                    f"Rename columns with `{part.place}.columns`; a name that is not read leaves one out.",
                )
    alike = zip(parts, features, kinds, strict=True)
    return concatenate_datasets(
        [part if feature == kind else part.cast(Features(kind)) for part, feature, kind in alike]
    )


def narrowed(feature: Any) -> Any:
    """Replace large strings and lists by the usual types, which are the same for less than 2 GiB."""
    if isinstance(feature, dict):
        return {name: narrowed(inner) for name, inner in feature.items()}
    if isinstance(feature, List | LargeList):
        return List(narrowed(feature.feature))
    return Value("string") if feature == Value("large_string") else feature
