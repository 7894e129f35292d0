"""Turn rows into samples: tokens for `clm`, `mlm` and `seq-cls`, raw rows for the tasks of TRL.

Everything here maps rows of a `Dataset` or a stream, batch by batch in bounded memory. Rows without a text
are left out. TRL tokenizes the rows of its tasks itself. They are checked here, since TRL looks only at
the first one, and then fails in the middle of the data or trains on other text than intended.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

from datasets import ClassLabel, Dataset, Features, IterableDataset, LargeList, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.pictures import with_pictures
from trahiv_cli.assets.sources import Documents, Opened, require_text
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.forms import require_column, task_form
from trahiv_cli.recipe.rows import (
    CHATML,
    KEYS,
    LABEL_HINT,
    MEND_A_ROW,
    PICTURES,
    Form,
    Tally,
    broken_row,
    chatml,
    class_of,
    label_error,
    listed,
    texts_of,
)
from trahiv_cli.recipe.schema import Recipe
from trahiv_cli.recipe.task_sections import ClmSection, GrpoSection, MlmSection, SeqClsSection

logger = logging.getLogger(__name__)
"""`train/tasks.py` passes its warnings on while data is prepared."""

Columns: TypeAlias = dict[str, list[list[int]]]

TOKENS = Features({"input_ids": List(Value("int32"))})
"""Token ids are int32: half the memory and disk of the int64 that `datasets` would infer."""

TEMPLATE_FAILURES = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of a chat template for a row: raised by the template itself, or by Python in an expression."""


# -- clm ------------------------------------------------------------------------------------------


def clm_documents(opened: Opened, clm: ClmSection, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Tokenize a dataset to documents of any length, each with exactly one end-of-text token at its end."""

    def tokenize(texts: list[str | None]) -> Columns:
        if not (texts := [text for text in texts if text]):
            return {"input_ids": []}
        # verbose=False: a document longer than the model's context is no mistake, it will be cut.
        documents = tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        eos = tokenizer.eos_token_id
        return {"input_ids": [ids if ids[-1:] == [eos] else [*ids, eos] for ids in documents]}

    require_text(opened, clm.dataset_text_field, "clm.dataset_text_field")
    return mapped(opened.rows, tokenize, [clm.dataset_text_field], TOKENS, **opened.parallel)


def clm_samples(documents: Documents, clm: ClmSection, which: str = "") -> Documents:
    """Cut `clm_documents` into samples of at most `max_length` tokens, or exactly `max_length` if packed.

    Raises:
        AssetError: there is not enough text for a single sample; `which` describes the text in messages.
    """
    length = clm.max_length

    def truncate(documents: list[list[int]]) -> Columns:
        """Cut each document; drop a document with nothing to predict, as its loss would be NaN."""
        return {"input_ids": [ids[:length] for ids in documents if len(ids) > 1]}

    rest: list[int] = []

    def pack(documents: list[list[int]], indices: list[int]) -> Columns:
        """Join documents and cut them into blocks; the rest of one batch begins the next.

        `datasets` calls it with one batch after the other, in order, and counts documents from 0 in each
        pass. So the index 0 marks a new pass over a stream, which drops the rest of the pass before.
        """
        nonlocal rest
        tokens = list(chain([] if indices[0] == 0 else rest, *documents))
        full = len(tokens) - len(tokens) % length
        rest = tokens[full:]
        return {"input_ids": [tokens[start : start + length] for start in range(0, full, length)]}

    make = pack if clm.packing else truncate
    samples = mapped(documents, make, ["input_ids"], TOKENS, with_indices=clm.packing)
    if not clm.packing:
        tell_left_out(documents, samples, f"documents of the {which}text have a single token")
    if next(iter(samples), None) is None:
        num_tokens = sum(len(document["input_ids"]) for document in documents)
        raise AssetError(
            f"The {which}text has {num_tokens} tokens, and one sample has {length if clm.packing else 2}.",
            "Add text, lower `clm.max_length`, or hold out another share (`data.eval.test_split_size`).",
        )
    return samples


# -- mlm ------------------------------------------------------------------------------------------


def mlm_documents(opened: Opened, mlm: MlmSection, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Tokenize a dataset, one sample a document, with the tokenizer's special tokens, cut to `max_length`.

    A document of special tokens alone is left out: these are never masked, and its loss would be NaN.
    """
    special = set(tokenizer.all_special_ids)

    def encode(texts: list[str | None]) -> Columns:
        documents = encoded(tokenizer, [text for text in texts if text], mlm.max_length)
        return {"input_ids": [ids for ids in documents if not special.issuperset(ids)]}

    require_text(opened, mlm.dataset_text_field, "mlm.dataset_text_field")
    return mapped(opened.rows, encode, [mlm.dataset_text_field], TOKENS, **opened.parallel)


# -- seq-cls --------------------------------------------------------------------------------------


def classified(opened: Opened, seq_cls: SeqClsSection, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Tokenize a dataset of texts and classes, one sample a row, cut to `max_length`.

    A class is written as `class_of` reads it. If the dataset has a list of its classes, numbers are indices
    into it. If that list shares names with `seq_cls.labels`, classes are matched by name, in any order.

    Raises:
        AssetError: a column is missing, or a class is missing or not in the recipe.
    """
    text = seq_cls.dataset_text_field
    label = seq_cls.dataset_label_field
    labels = seq_cls.labels
    require_text(opened, text, "seq_cls.dataset_text_field")
    require_column(opened, label, "seq_cls.dataset_label_field")
    feature = opened.features.get(label)
    numbers = None
    if isinstance(feature, ClassLabel):
        names = feature.names if set(feature.names) & set(labels) else labels
        if unknown := [name for name in names if name not in labels]:
            raise AssetError(
                f"The dataset {opened.name} has classes that `seq_cls.labels` does not name: "
                f"{listed(unknown)}.",
                f"Its classes are {listed(names)}.",
            )
        numbers = {number: labels.index(name) for number, name in enumerate(names)}

    name = opened.name  # the function must not refer to the rows: `datasets` hashes and pickles it

    def classify(texts: list[str | None], said: list[Any], indices: list[int]) -> dict[str, Any]:
        rows = [row for row in zip(texts, said, indices, strict=True) if row[0]]
        found = [class_of(one, labels) if numbers is None else numbers.get(one) for _, one, _ in rows]
        if None in found:
            _, one, index = rows[found.index(None)]
            raise broken_row(name, index + 1, label_error(one, labels), LABEL_HINT)
        ids = encoded(tokenizer, [str(text) for text, _, _ in rows], seq_cls.max_length)
        return {"input_ids": ids, "labels": found}

    features = Features({**TOKENS, "labels": Value("int64")})
    return mapped(opened.rows, classify, [text, label], features, with_indices=True, **opened.parallel)


# -- the tasks of TRL -----------------------------------------------------------------------------


def trl_rows(opened: Opened, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Keep the columns of a dataset that TRL's trainer of the recipe's task reads.

    `conversations` become `messages` with `user` and `assistant` for ShareGPT's `human` and `gpt` (TRL
    renames the keys only). Columns that TRL passes to the chat template are kept too. A stream is checked
    while it is read.

    Raises:
        AssetError: see `task_form`; there is no chat template; a row has an error.
    """
    form = task_form(opened, recipe)
    assert form is not None
    if form.keys is not None and tokenizer.chat_template is None:
        problem = "holds conversations, and the tokenizer has no chat template to write them as text"
        hint = "Set `data.chat_template: FILE.jinja`, or name a tokenizer that has one"
        raise AssetError(f"The dataset {opened.name} {problem}.", f"{hint} (`model.tokenizer_name_or_path`).")
    passed_on = ("tools", "chat_template_kwargs")  # to the chat template
    pictures = PICTURES if recipe.sft is not None else ()
    optional = [column for column in (*passed_on, *pictures) if column in opened.first]
    flag = [form.flag] if form.flag else []
    columns = dict.fromkeys([*form.columns, *flag, *form.kept, *optional])
    rows = with_pictures(opened).select_columns(list(columns))
    rows = judged(replace(opened, rows=rows), form, tokenizer)
    if recipe.grpo is not None:
        return short_prompts(rows, recipe.grpo, tokenizer)
    if form.columns != ("conversations",):
        return rows
    if form.keys == CHATML:
        return rows.rename_column("conversations", "messages")
    told = opened.features.get("conversations")
    features = None
    if isinstance(told, List | LargeList) and isinstance(told.feature, dict):
        # Known features are passed on: inferring them from the first rows fails if a later row has more.
        inner = {KEYS.get(key, key): feature for key, feature in told.feature.items()}
        kept = {column: opened.features[column] for column in passed_on if column in opened.features}
        features = Features({**kept, "messages": type(told)(inner)})
    only = ["conversations"]
    options = {"input_columns": only, "remove_columns": only, "features": features}
    return rows.map(to_messages, **options, **opened.parallel)


def short_prompts(rows: Documents, grpo: GrpoSection, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Leave out prompts that leave no room for a completion; log their number.

    Raises:
        AssetError: no prompt is left.
    """
    most = grpo.max_length - grpo.max_completion_length

    short = rows.filter(lambda row: len(prompt_ids(tokenizer, row)) <= most)
    tell_left_out(rows, short, f"prompts have more than {most:,} tokens (`grpo.max_length`)")
    if next(iter(short), None) is None:
        raise AssetError(f"No prompt has at most {most:,} tokens.", "Raise `grpo.max_length`.")
    return short


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[int]:
    """Return the tokens of a row's prompt, a text or a conversation, as TRL's GRPO makes them."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    options = {"add_generation_prompt": True, "return_dict": False, **template_options(row)}
    return list(tokenizer.apply_chat_template(prompt, **options))


def template_options(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template that a row has beside its messages."""
    tools = row.get("tools")
    own = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    return own | (row.get("chat_template_kwargs") or {})


def to_messages(conversation: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Turn a conversation of ShareGPT into messages of roles and contents."""
    return {"messages": [chatml(message) for message in conversation]}


def judged(opened: Opened, form: Form, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Check each row by its form and with the chat template, log warnings, and return all rows.

    The rows of a stream are checked as they are read: the first row with an error ends the stream.

    Raises:
        AssetError: rows have errors; the message has each kind of error, with its first rows.
    """
    rows = opened.rows
    name = opened.name  # the functions must not refer to the rows: `datasets` hashes and pickles them
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "\n".join(template.values())

    def judge(row: dict[str, Any]) -> dict[str, str]:
        error = form.error(row, template)
        warning = ""
        if not error:
            warning = form.warning(row)
            try:
                for column, messages in form.conversations(row):
                    for message in lost_by_template(tokenizer, messages, row):
                        warning = (
                            f"has a message of the {message['role']} in {column!r} that the template loses"
                        )
                        if isinstance(message["content"], list):
                            error = form.doubt(row, template)
            except TEMPLATE_FAILURES as failure:
                reason = " ".join(str(failure).split()) or type(failure).__name__
                error = (
                    form.doubt(row, template)
                    or f"can't be written by the chat template (`data.chat_template`): {reason}"
                )
        return {"error": error, "warning": warning}

    told = {""}

    def judge_stream(row: dict[str, Any], index: int) -> bool:
        found = judge(row)
        if found["error"]:
            raise broken_row(name, index + 1, found["error"])
        if found["warning"] not in told:
            logger.warning("Row %s of %s %s.", f"{index + 1:,}", name, found["warning"])
            told.add(found["warning"])
        return True

    if isinstance(rows, IterableDataset):
        return rows.filter(judge_stream, with_indices=True)
    tally = Tally(name)
    features = Features({"error": Value("string"), "warning": Value("string")})
    options = {"features": features, "remove_columns": rows.column_names}
    batches = rows.map(judge, **options, **opened.parallel).iter(batch_size=1000)
    found = chain.from_iterable(zip(one["error"], one["warning"], strict=True) for one in batches)
    for number, (error, warning) in enumerate(found, 1):
        tally.add(number, error, warning)
    if tally.errors:
        raise AssetError("\n".join(tally.sentences(tally.errors)), MEND_A_ROW)
    for sentence in tally.sentences(tally.warnings):
        logger.warning(sentence)
    return rows


def lost_by_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], row: dict[str, Any]
) -> list[dict[str, Any]]:
    """Apply the chat template to a conversation; return the messages whose texts are not in the result.

    Messages whose parts it writes in the notation of Python or JSON count as lost too. Errors of the template
    are passed on.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_options(row))

    def has(said: Any) -> bool:
        return str(said) in text or json.dumps(said, ensure_ascii=False)[1:-1] in text

    def is_lost(message: dict[str, Any]) -> bool:
        content = message.get("content")
        is_whole = all(has(said.strip()) for said in texts_of(message))
        return not is_whole or (isinstance(content, list) and any(map(has, content)))

    return [message for message in messages if is_lost(message)]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    """Tokenize with special tokens and cut; for one text, a model infers the mask and the token types."""
    if not texts:
        return []
    only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, truncation=True, max_length=max_length, **only_ids)["input_ids"]


def tell_left_out(before: Documents, after: Documents, what: str) -> None:
    """Log the number of rows that were left out; for a stream it is unknown, and nothing is logged."""
    if isinstance(after, Dataset) and (num_missing := len(before) - len(after)):
        logger.warning("%d of %d %s, and are left out.", num_missing, len(before), what)


def mapped(
    rows: Documents, function: Any, columns: list[str], features: Features, **options: Any
) -> Documents:
    """Replace all columns by the result of `function` for `columns`, with further `options` of `map`."""
    return rows.select_columns(columns).map(
        function,
        input_columns=columns,
        batched=True,
        batch_size=100,  # it limits the memory of tokenization: a document may be a whole file
        remove_columns=columns,
        features=features,
        **options,
    )
