"""From texts to tokens: what one sample of `clm`, `mlm` and `seq-cls` is.

Everything here maps rows of a `Dataset` or a stream, batch by batch in bounded memory. Rows without a text
are left out. What `datasets` calls can be sent to processes: functions and classes of this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from datasets import ClassLabel, Features, List, Value
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.collators import MaskingCollator
from trahiv_cli.assets.sources import Documents, Opened, parallel, require_text
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.forms import listed, numbers_of, require_column, unknown_label
from trahiv_cli.recipe.schema import ClmSection, MlmSection, SeqClsSection

Columns: TypeAlias = dict[str, list[list[int]]]

IDS = List(Value("int32"))
"""Token ids are int32: half the memory and disk of the int64 that `datasets` would infer."""

TOKENS = Features({"input_ids": IDS})
MASKED = Features({"input_ids": IDS, "labels": IDS})
CLASSIFIED = Features({"input_ids": IDS, "labels": Value("int64")})

DOCUMENTS_PER_BATCH = 100
"""Bounds the memory of tokenizing: documents may be whole files."""


# -- clm ------------------------------------------------------------------------------------------


def clm_documents(
    opened: Opened, clm: ClmSection, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None
) -> Documents:
    """Tokenize a dataset: documents of any length, each with exactly one end-of-text token at its end.

    `AssetError` if it has no text column.
    """
    require_text(opened, clm.dataset_text_field, "clm.dataset_text_field")
    end_each = partial(tokenize, tokenizer)
    return mapped(opened.rows, end_each, [clm.dataset_text_field], TOKENS, num_proc=num_proc)


def clm_samples(documents: Documents, clm: ClmSection, which: str = "") -> Documents:
    """Cut `clm_documents` into samples of at most `max_length` tokens, or of exactly so many if packed.

    `which`, with a space behind it, says in the error what text it is.

    Raises:
        AssetError: there is not enough text for a single one.
    """
    if clm.packing:
        samples = mapped(documents, _Pack(clm.max_length), ["input_ids"], TOKENS, with_indices=True)
    else:
        samples = mapped(documents, partial(truncate, clm.max_length), ["input_ids"], TOKENS)
    if next(iter(samples), None) is None:
        num_tokens = sum(len(document["input_ids"]) for document in documents)
        wanted = f"one block has {clm.max_length}" if clm.packing else "one sample has at least 2"
        raise AssetError(
            f"The {which}text has {num_tokens} tokens, and {wanted}.",
            "Add text, lower `clm.max_length`, or hold out another share (`data.eval.test_split_size`).",
        )
    return samples


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str | None]) -> Columns:
    """Turn texts into tokens, one list a document; empty documents are left out."""
    if not (texts := [text for text in texts if text]):
        return {"input_ids": []}
    # verbose=False: a document longer than the model's context is no mistake, it will be cut.
    documents = tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return {"input_ids": [ids if ids[-1:] == [eos] else [*ids, eos] for ids in documents]}


@dataclass
class _Pack:
    """Joins documents and cuts them into blocks, carrying the rest of one batch over to the next.

    `datasets` calls it with one batch after the other, in order, and counts documents from 0 in each
    pass: that is how a second pass over a stream knows to forget the first one's rest.
    """

    max_length: int
    rest: list[int] = field(default_factory=list)

    def __call__(self, documents: list[list[int]], indices: list[int]) -> Columns:
        tokens = list(chain([] if indices[0] == 0 else self.rest, *documents))
        full = len(tokens) - len(tokens) % self.max_length
        self.rest = tokens[full:]
        return {"input_ids": [tokens[i : i + self.max_length] for i in range(0, full, self.max_length)]}


def truncate(max_length: int, documents: list[list[int]]) -> Columns:
    """Cut each document; one that leaves nothing to predict is dropped, as its loss would be NaN."""
    return {"input_ids": [ids[:max_length] for ids in documents if len(ids) > 1]}


# -- mlm ------------------------------------------------------------------------------------------


def mlm_documents(
    opened: Opened, mlm: MlmSection, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None
) -> Documents:
    """Tokenize a dataset, one sample a document, with the tokenizer's special tokens, cut to `max_length`.

    Each sample has at least one token that is not special: the collator hides some of these in each pass.
    `AssetError` if it has no text column.
    """
    require_text(opened, mlm.dataset_text_field, "mlm.dataset_text_field")
    encode = partial(maskable, tokenizer, mlm.max_length)
    return mapped(opened.rows, encode, [mlm.dataset_text_field], TOKENS, num_proc=num_proc)


def maskable(tokenizer: PreTrainedTokenizerBase, max_length: int, texts: list[str | None]) -> Columns:
    """Turn texts into tokens; a document with nothing to hide is left out, as its loss would be NaN."""
    documents = encoded(tokenizer, [text for text in texts if text], max_length)
    special = set(tokenizer.all_special_ids)  # these the collator never hides
    return {"input_ids": [ids for ids in documents if not special.issuperset(ids)]}


def masked(
    documents: Documents,
    mlm: MlmSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    num_proc: int | None,
) -> Documents:
    """Hide tokens of `mlm_documents` once and for all, so that every evaluation asks the same.

    What is hidden in a document is drawn from `seed` and its index among `documents`, whatever `num_proc`.
    Each sample has `labels`, -100 where nothing is hidden, and at least one hidden token.
    """
    mask = partial(mask_once, tokenizer, mlm.mlm_probability, seed)
    return mapped(documents, mask, ["input_ids"], MASKED, with_indices=True, num_proc=num_proc)


def mask_once(
    tokenizer: PreTrainedTokenizerBase,
    probability: float,
    seed: int,
    documents: list[list[int]],
    indices: list[int],
) -> Columns:
    """Turn documents into what the model sees and what it is asked, the same in any order of batches."""
    samples = [
        MaskingCollator(tokenizer, probability, seed=seed + index)([{"input_ids": ids}])
        for ids, index in zip(documents, indices, strict=True)
    ]
    return {name: [sample[name][0].tolist() for sample in samples] for name in ("input_ids", "labels")}


# -- seq-cls --------------------------------------------------------------------------------------


def classified(
    opened: Opened, seq_cls: SeqClsSection, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None
) -> Documents:
    """Tokenize a dataset of texts and classes, one sample a row, cut to `max_length`.

    A class is its number or its name in `seq_cls.labels`. If the dataset itself names its classes as
    `seq_cls.labels` does, it is the names that count, whatever their order; otherwise the numbers.

    Raises:
        AssetError: there is no such column, or a row's class is missing or none of the recipe's (in a
            stream, when that row is reached).
    """
    text, label, labels = seq_cls.dataset_text_field, seq_cls.dataset_label_field, seq_cls.labels
    require_text(opened, text, "seq_cls.dataset_text_field")
    require_column(opened, label, "seq_cls.dataset_label_field")
    feature, numbers = opened.features.get(label), numbers_of(seq_cls)
    if isinstance(feature, ClassLabel) and set(feature.names) & set(labels):
        if unknown := [name for name in feature.names if name not in labels]:
            raise AssetError(
                f"The dataset {opened.name} has classes that `seq_cls.labels` does not name: "
                f"{listed(unknown)}.",
                f"Its classes are {listed(feature.names)}.",
            )
        numbers |= {number: labels.index(name) for number, name in enumerate(feature.names)}
    classify = _Classify(tokenizer, seq_cls, numbers, opened.name)
    return mapped(opened.rows, classify, [text, label], CLASSIFIED, with_indices=True, num_proc=num_proc)


@dataclass(frozen=True)
class _Classify:
    """Turns texts and classes into tokens and the classes' numbers."""

    tokenizer: PreTrainedTokenizerBase
    seq_cls: SeqClsSection
    numbers: dict[int | float | str, int]  # what a row may say -> the number of the class
    dataset: str

    def __call__(self, texts: list[str | None], labels: list[Any], indices: list[int]) -> dict[str, Any]:
        kept, numbers = [], []
        for text, label, index in zip(texts, labels, indices, strict=True):
            if not text:
                continue
            # A column of whole numbers with a gap somewhere reads as floats, which are equal to them as keys.
            number = self.numbers.get(label) if isinstance(label, int | float | str) else None
            if number is None:
                raise unknown_label(self.dataset, index, label, self.seq_cls.labels)
            kept.append(text)
            numbers.append(number)
        return {"input_ids": encoded(self.tokenizer, kept, self.seq_cls.max_length), "labels": numbers}


# -- all ------------------------------------------------------------------------------------------


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    """Tokenize with special tokens and cut. Of one text, a model knows the mask and the types by itself."""
    if not texts:
        return []
    only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
    return list(tokenizer(texts, truncation=True, max_length=max_length, **only_ids)["input_ids"])


def mapped(
    rows: Documents,
    function: Any,
    columns: list[str],
    features: Features,
    *,
    num_proc: int | None = None,
    with_indices: bool = False,
) -> Documents:
    """Replace all columns by what `function` makes of `columns`, batch by batch."""
    return rows.select_columns(columns).map(
        function,
        with_indices=with_indices,
        input_columns=columns,
        batched=True,
        batch_size=DOCUMENTS_PER_BATCH,
        remove_columns=columns,
        features=features,
        **parallel(rows, num_proc),
    )
