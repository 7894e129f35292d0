"""From documents to samples: tokens, the held-out share, packed blocks, an order that differs by peer.

Where documents are read from is `sources.py`. Nothing here knows other peers: whoever calls passes a seed
that all share and one that is the peer's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    disable_progress_bars,
)
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.sources import Documents, load_documents
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import ClmSection, DataSection, DatasetSection

TOKENS = Features({"input_ids": List(Value("int32"))})
"""int32: half the memory and disk of the int64 that `datasets` would infer."""

DOCUMENTS_PER_BATCH = 100
"""Bounds the memory of tokenizing: documents may be whole files."""

STREAM_BUFFER = 1000
"""Samples that a stream shuffles among: about 40 MB for blocks of 1024 tokens."""

IGNORED_LABEL = -100
"""What torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Splits:
    """What is trained on, and what is measured with (None if nothing is held out).

    Each sample is `{"input_ids": [int, ...]}`, exactly `max_length` long if packed.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None


def build_datasets(
    data: DataSection,
    clm: ClmSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    peer_seed: int,
) -> Splits:
    """Read, tokenize, hold out, pack and shuffle the recipe's datasets.

    Every document ends with exactly one end-of-text token. Local and hub data are tokenized into the
    cache of `datasets`; the built-in text stays in memory; a stream is tokenized while it is read.

    Args:
        data: which datasets, what share is held out, whether to shuffle and stream.
        clm: text column, block length, packing.
        tokenizer: as from `build_tokenizer`; has an end-of-text token.
        seed: shared; draws the held-out documents, the same on every peer with the same data.
        peer_seed: this peer's own; draws the order of its training samples.

    Returns:
        The samples. `train` is an `IterableDataset` if streaming.

    Raises:
        AssetError: a dataset cannot be opened (see `load_documents`), or there is too little text to
            hold out the share or to fill one block.
    """
    disable_progress_bars()
    parts = [_tokenized(source, data, clm, tokenizer) for source in data.datasets]
    train, held_out = concatenate_datasets(parts), None
    if data.eval.test_split_size:
        train, held_out = _hold_out(train, data.eval.test_split_size, seed)
    return Splits(
        train=_shuffled(_samples(train, clm), peer_seed) if data.shuffle else _samples(train, clm),
        eval=None if held_out is None else _samples(held_out, clm, "held-out "),
    )


def build_collator(clm: ClmSection, tokenizer: PreTrainedTokenizerBase) -> Collator:
    """Make the function that turns samples into one batch."""
    return Collator(pad_token_id=tokenizer.pad_token_id, is_padded=not clm.packing)


@dataclass(frozen=True)
class Collator:
    """Samples -> a batch of `input_ids`, `labels` and, where samples differ in length, `attention_mask`.

    Labels are masked by position, not by token: `DataCollatorForLanguageModeling` masks every pad token,
    and where that is also the end-of-text token (most models have no other) no document would ever end.
    """

    pad_token_id: int
    is_padded: bool

    def __call__(self, samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Collate `samples`.

        Returns:
            Tensors of shape (samples, longest), int64, on the CPU. The model shifts the labels.
        """
        rows = [sample["input_ids"] for sample in samples]
        batch = {"input_ids": _padded(rows, self.pad_token_id), "labels": _padded(rows, IGNORED_LABEL)}
        if self.is_padded:
            batch["attention_mask"] = _padded([[1] * len(row) for row in rows], 0)
        return batch


def _padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


@dataclass(frozen=True)
class _Tokenize:
    """Texts -> tokens, one list a document; empty documents are left out."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, texts: list[str | None]) -> dict[str, list[list[int]]]:
        texts = [text for text in texts if text]
        if not texts:
            return {"input_ids": []}
        # verbose=False: a document longer than the model's context is no mistake, it will be cut.
        documents = self.tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        eos = self.tokenizer.eos_token_id
        return {"input_ids": [ids if ids[-1:] == [eos] else [*ids, eos] for ids in documents]}


@dataclass
class _Pack:
    """Joins documents and cuts them into blocks, carrying the rest of one batch over to the next.

    `datasets` calls it with one batch after the other, in order, and counts documents from 0 in each
    pass: that is how a second pass over a stream knows to forget the first one's rest.
    """

    max_length: int
    rest: list[int] = field(default_factory=list)

    def __call__(self, documents: list[list[int]], indices: list[int]) -> dict[str, list[list[int]]]:
        rest = [] if indices[0] == 0 else self.rest
        tokens = list(chain(rest, *documents))
        full = len(tokens) - len(tokens) % self.max_length
        self.rest = tokens[full:]
        return {"input_ids": [tokens[i : i + self.max_length] for i in range(0, full, self.max_length)]}


@dataclass(frozen=True)
class _Truncate:
    """Cuts each document; one that leaves nothing to predict is dropped, as its loss would be NaN."""

    max_length: int

    def __call__(self, documents: list[list[int]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [ids[: self.max_length] for ids in documents if len(ids) > 1]}


def _tokenized(
    source: DatasetSection, data: DataSection, clm: ClmSection, tokenizer: PreTrainedTokenizerBase
) -> Documents:
    column = clm.dataset_text_field
    documents = load_documents(source, column, streaming=data.streaming)
    parallel = {} if data.streaming else {"num_proc": data.num_proc}
    return _mapped(documents, _Tokenize(tokenizer), column, **parallel)


def _hold_out(documents: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split by document, before blocks are cut: no text is on both sides."""
    num_held_out = max(1, round(share * len(documents)))
    if num_held_out >= len(documents):
        raise AssetError(
            f"Of {len(documents)} documents, {num_held_out} would be held out and none left to train on.",
            "A .txt file is one document: split it into several, or set `data.eval.test_split_size: 0`.",
        )
    drawn = documents.shuffle(seed=seed, keep_in_memory=True)
    return drawn.skip(num_held_out), drawn.take(num_held_out)


def _samples(documents: Documents, clm: ClmSection, which: str = "") -> Documents:
    """Cut documents into samples and make sure that there is at least one."""
    if clm.packing:
        samples = _mapped(documents, _Pack(clm.max_length), "input_ids", with_indices=True)
    else:
        samples = _mapped(documents, _Truncate(clm.max_length), "input_ids")
    if next(iter(samples), None) is None:
        num_tokens = sum(len(document["input_ids"]) for document in documents)
        wanted = f"one block has {clm.max_length}" if clm.packing else "one sample has at least 2"
        raise AssetError(
            f"The {which}text has {num_tokens} tokens, and {wanted}.",
            "Add text, lower `clm.max_length`, or hold out another share (`data.eval.test_split_size`).",
        )
    return samples


def _shuffled(samples: Documents, peer_seed: int) -> Documents:
    """Shuffle blocks, not documents: peers that read one long file must not meet in the same place."""
    if isinstance(samples, IterableDataset):
        return samples.shuffle(seed=peer_seed, buffer_size=STREAM_BUFFER)
    return samples.shuffle(seed=peer_seed, keep_in_memory=True)


def _mapped(documents: Documents, function: Any, column: str, **options: Any) -> Documents:
    """Replace `column` by the tokens that `function` makes of it, batch by batch."""
    return documents.map(
        function,
        input_columns=[column],
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        remove_columns=[column],
        features=TOKENS,
        **options,
    )
