"""What a row must hold for the tasks that TRL tokenizes itself, `sft` and `dpo`.

Rows stay raw. They are checked here, since TRL looks at the first one only and then fails in the middle of
the data, or trains on something else than was meant, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Features, IterableDataset, LargeList, List
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.sources import Documents, Opened
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import SftSection

OPTIONAL = ("tools", "chat_template_kwargs")
"""Columns that TRL hands to the chat template."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles that chat templates know; others are the same."""

_CHATML = ("role", "content")
_SHAREGPT = ("from", "value")
_RENAMED = dict(zip(_SHAREGPT, _CHATML, strict=True))

_SFT_COLUMNS = {"messages", "conversations", "completion"}
_DPO_COLUMNS = {"chosen", "rejected"}

_ALSO_CALLED = {
    "prompt": ("instruction", "question", "query", "problem", "input"),
    "completion": ("output", "response", "answer", "solution"),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
    "chosen": ("chosen_response", "preferred", "winner"),
    "rejected": ("rejected_response", "dispreferred", "loser"),
}
"""Column -> what published datasets call it, the commonest first."""


def sft_rows(
    opened: Opened, sft: SftSection, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None
) -> Documents:
    """Keep what TRL's SFTTrainer reads of a dataset, in the first of these forms that it has.

    `prompt` and `completion`; `messages`; `conversations`, which become `messages` with `user` and
    `assistant` for ShareGPT's `human` and `gpt` (TRL renames the keys only); the text column.

    Args:
        opened: the dataset.
        sft: names the text column and what the loss is taken of.
        tokenizer: its chat template is needed for conversations.
        num_proc: processes that check the rows; None for one. A stream is checked while it is read.

    Returns:
        The rows, in their order, with these columns and those of `OPTIONAL` that there are.

    Raises:
        AssetError: there are no such columns, a row lacks a value, there is no chat template, or the loss
            is to be taken of something that this form does not have.
    """
    forms = [("prompt", "completion"), ("messages",), ("conversations",), (sft.dataset_text_field,)]
    columns = next((form for form in forms if all(column in opened.first for column in form)), None)
    if columns is None:
        raise _no_form(
            opened, f"`messages`, `prompt` and `completion`, or a text column ({sft.dataset_text_field!r})"
        )
    form = _form(opened, columns)
    if columns[0] in ("messages", "conversations") and form.keys is None:
        raise _no_conversation(opened, columns[0])
    if form.keys is None and sft.assistant_only_loss:
        raise AssetError(
            f"The dataset {opened.name} holds texts, and only in conversations is there an assistant.",
            "Set `sft.assistant_only_loss: false`.",
        )
    if sft.completion_only_loss is True and "completion" not in columns:
        raise AssetError(
            f"The dataset {opened.name} has no `completion` to train; it has {opened.columns}.",
            "Set `sft.completion_only_loss: auto`; of conversations, `sft.assistant_only_loss: true` trains "
            "the answers.",
        )
    _require_template(opened, form, tokenizer)
    rows = form.checked(opened, num_proc)
    if columns != ("conversations",):
        return rows
    if form.keys == _CHATML:
        return rows.rename_column("conversations", "messages")
    return _as_chatml(opened, rows, num_proc)


def dpo_rows(opened: Opened, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None) -> Documents:
    """Keep what TRL's DPOTrainer reads of a dataset: `chosen` and `rejected`, and `prompt` if there is one.

    Args, returns and raises as for `sft_rows`.
    """
    if not all(column in opened.first for column in ("chosen", "rejected")):
        raise _no_form(opened, "`chosen` and `rejected`")
    columns = tuple(column for column in ("prompt", "chosen", "rejected") if column in opened.first)
    form = _form(opened, columns)
    _require_template(opened, form, tokenizer)
    return form.checked(opened, num_proc)


@dataclass(frozen=True)
class _Form:
    """The columns that a row must have, and the keys of a message in them; none if they hold texts."""

    columns: tuple[str, ...]
    keys: tuple[str, str] | None

    def checked(self, opened: Opened, num_proc: int | None) -> Documents:
        """Keep these columns; refuse the first row that lacks something in one of them."""
        optional = [column for column in OPTIONAL if column in opened.first]
        needed = [*self.columns, *(column for column in optional if column == "chat_template_kwargs")]
        rows = opened.rows.select_columns([*self.columns, *optional])
        check = _Check(opened.name, tuple(needed), self.keys)
        return rows.filter(check, with_indices=True, input_columns=needed, **_parallel(rows, num_proc))


@dataclass(frozen=True)
class _Check:
    """Passes every row on, and stops at one that TRL could not read. A class, to be sent to processes."""

    dataset: str
    columns: tuple[str, ...]
    keys: tuple[str, str] | None

    def __call__(self, *values: Any) -> bool:
        for column, value in zip(self.columns, values[:-1], strict=True):
            problem = self._problem(column, value)
            if problem:
                raise AssetError(
                    f"Row {values[-1] + 1} of {self.dataset} {problem}.", "Mend or remove that row."
                )
        return True

    def _problem(self, column: str, value: Any) -> str:
        if value is None:
            return f"has no {column!r}"
        if column in OPTIONAL:
            return ""
        if self.keys is None:
            return "" if isinstance(value, str) else f"has {type(value).__name__} in {column!r}, not text"
        if _is_conversation(value, self.keys):
            return ""
        return f"has something else in {column!r} than messages of {self.keys[0]} and {self.keys[1]}"


def _form(opened: Opened, columns: tuple[str, ...]) -> _Form:
    """Tell conversations from texts by the first row; all columns must hold the same."""
    kinds: dict[str, tuple[str, str] | None] = {}
    for column in columns:
        value = opened.first[column]
        if isinstance(value, str):
            kinds[column] = None
        elif _is_conversation(value, _CHATML):
            kinds[column] = _CHATML
        elif _is_conversation(value, _SHAREGPT) and column == "conversations":
            kinds[column] = _SHAREGPT
        else:
            raise _no_conversation(opened, column)
    if len(set(kinds.values())) > 1:
        said = ", ".join(
            f"{column!r} holds {'conversations' if kinds[column] else 'text'}" for column in columns
        )
        if kinds.get("prompt", _CHATML) is None:
            away = f"`{opened.place}.columns: {{prompt: prompt_text}}`"
            hint = f"Where the answers begin with the prompt, {away} leaves it out."
        else:
            hint = "Give all of them texts, or all of them messages."
        raise AssetError(f"The columns of {opened.name} do not fit together: {said}.", hint)
    return _Form(columns, kinds[columns[0]])


def _is_conversation(value: Any, keys: tuple[str, str]) -> bool:
    """Tell whether `value` is a list of messages; a message may have no content, as one that calls tools."""
    speaker, content = keys
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and message.get(speaker) and content in message for message in value
        )
    )


def _no_conversation(opened: Opened, column: str) -> AssetError:
    value = opened.first[column]
    hint = f"Rename columns with `{opened.place}.columns`."
    if _is_conversation(value, _SHAREGPT):
        renamed = f"{opened.place}.columns: {{{column}: conversations}}"
        hint = f"ShareGPT's messages are read from `conversations`: `{renamed}`."
    return AssetError(
        f"The column {column!r} of {opened.name} holds {type(value).__name__} in its first row, and not a "
        "conversation: a list of {role, content}.",
        hint,
    )


def _require_template(opened: Opened, form: _Form, tokenizer: PreTrainedTokenizerBase) -> None:
    if form.keys is not None and tokenizer.chat_template is None:
        raise AssetError(
            f"The dataset {opened.name} holds conversations, and the tokenizer has no chat template to write "
            "them as text.",
            "Set `data.chat_template: FILE.jinja`, or name a tokenizer that has one "
            "(`model.tokenizer_name_or_path`).",
        )


def _no_form(opened: Opened, wanted: str) -> AssetError:
    """Say what was looked for, what there is, and what to do about it."""
    there, is_sft = set(opened.first), "completion" in wanted
    if is_sft and there >= _DPO_COLUMNS:
        hint = "It is a dataset of preferences: set `task: dpo`."
    elif not is_sft and there & _SFT_COLUMNS:
        hint = "It is a dataset of answers without preferences: set `task: sft`."
    else:
        guesses = {
            next(name for name in names if name in there): column
            for column, names in _ALSO_CALLED.items()
            if f"`{column}`" in wanted or (column == "prompt" and not is_sft)
            if column not in there and there & set(names)
        }
        renamed = ", ".join(f"{old}: {new}" for old, new in guesses.items())
        hint = f"Rename its columns with `{opened.place}.columns`{f': {{{renamed}}}' if renamed else ''}."
        if is_sft and not renamed:
            hint = f"{hint[:-1]}, or name a text column with `sft.dataset_text_field`."
    return AssetError(f"The dataset {opened.name} has no {wanted}; it has {opened.columns}.", hint)


def _parallel(rows: Documents, num_proc: int | None) -> dict[str, Any]:
    return {} if isinstance(rows, IterableDataset) else {"num_proc": num_proc}


# -- ShareGPT -------------------------------------------------------------------------------------


def _as_chatml(opened: Opened, rows: Documents, num_proc: int | None) -> Documents:
    """Turn `conversations` of ShareGPT into `messages` of roles and contents."""
    told = opened.features.get("conversations")
    features = None
    if isinstance(told, List | LargeList) and isinstance(told.feature, dict):
        # What can be known is said: guessing by the first rows fails where a later one has more.
        inner = {_RENAMED.get(key, key): feature for key, feature in told.feature.items()}
        kept = {column: opened.features[column] for column in OPTIONAL if column in opened.features}
        features = Features({**kept, "messages": type(told)(inner)})
    return rows.map(
        _messages,
        input_columns=["conversations"],
        remove_columns=["conversations"],
        features=features,
        **_parallel(rows, num_proc),
    )


def _messages(conversation: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    messages = [{_RENAMED.get(key, key): value for key, value in message.items()} for message in conversation]
    for message in messages:
        message["role"] = SHAREGPT_ROLES.get(message["role"], message["role"])
    return {"messages": messages}
