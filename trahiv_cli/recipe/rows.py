"""Errors and warnings about the rows of a dataset, whichever reader they come from; rows are counted from 1.

An error is certain damage: training would teach something that the row does not say. A warning is about rows
that may be intended. No tokenizer is used here: `assets/samples.py` also applies the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.document import kind_of

CHATML = ("role", "content")
SHAREGPT = ("from", "value")
"""Keys of a message in the two formats of conversations."""

KEYS = dict(zip(SHAREGPT, CHATML, strict=True))

PICTURES = ("images", "image")
"""The columns of a row's pictures: a list of them, or one."""

MEND_A_ROW = "Fix or remove that row."
"""The hint for a row that no trainer could read."""

LABEL_HINT = (
    "A label is one of these names, or its number from 0 unless names are numbers: mend the row, "
    "`seq_cls.labels`, or `seq_cls.dataset_label_field`."
)
"""The hint for a class that is not in the recipe."""

_KNOWN_ROLES = frozenset(
    "system developer user assistant tool function function_call observation ipython".split()
)


@dataclass(frozen=True)
class Form:
    """The columns that a row must have, and the keys of a message in them (None if they hold texts)."""

    columns: tuple[str, ...]
    keys: tuple[str, str] | None
    flag: str | None = None  # a column of true or false
    answers: tuple[str, ...] = ()  # columns with the right answers, which rewards need
    kept: tuple[str, ...] = ()  # all columns that rewards may read

    def error(self, row: Mapping[str, Any], template: str | None = None) -> str:
        """Return the error in a row, as words to follow its number, or "".

        A role that the chat `template` names is known. Without a template, unknown roles are left to `doubt`.
        """
        if row.get("chat_template_kwargs", {}) is None:
            return "has no 'chat_template_kwargs'"
        for column in self.columns:
            if problem := self._error_in(column, row.get(column), template):
                return problem
        if self.flag and not isinstance(row.get(self.flag), bool):
            return f"has {kind_of(row.get(self.flag))} in {self.flag!r}, and not true or false"
        for column in self.answers:
            if row.get(column) is None:
                return f"has no {column!r}"
        return ""

    def doubt(self, row: Mapping[str, Any], template: str | None = None) -> str:
        """Return a feature of an error-free row that some chat templates do not support, as words, or ""."""
        _, key = self.keys or CHATML
        for column, messages in self.conversations(row):
            for message in messages:
                if template is None and message["role"] not in _KNOWN_ROLES:
                    return _unknown_role(message["role"], column)
                if isinstance(message.get("content"), list):
                    return _no_text(message["content"], key, column)
        return ""

    def warning(self, row: Mapping[str, Any]) -> str:
        """Return the warning about a row without an error, as words to follow its number, or ""."""
        for column in self.columns:
            if self.keys is None and column != "prompt" and not row[column].strip():
                return f"has an empty {column!r}"
        for column, messages in self.conversations(row):
            before = "system"
            for message in messages:
                role = message["role"]
                if role == "assistant" and not _says_something(message):
                    return f"has an empty answer in {column!r}"
                if role == before and role in ("user", "assistant"):
                    return f"has two messages of the {role} in a row in {column!r}"
                if role == "assistant" and before in ("system", "developer"):
                    return f"begins with the assistant in {column!r}"
                before = role
        return ""

    def conversations(self, row: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield each conversation of a sound row: its last column, and its messages of role and content."""
        if self.keys is not None:
            prompt = row["prompt"] if "prompt" in self.columns else []
            for column in self.columns:
                if column != "prompt":
                    yield column, [chatml(message) for message in (*prompt, *row[column])]

    def _error_in(self, column: str, value: Any, template: str | None) -> str:
        if value is None:
            return f"has no {column!r}"
        if self.keys is None:
            return "" if isinstance(value, str) else f"has {type(value).__name__} in {column!r}, not text"
        if not _all_have(value, self.keys[0]):
            return f"has something else in {column!r} than messages of {self.keys[0]} and {self.keys[1]}"
        messages = [chatml(message) for message in value]
        for message in messages:
            if problem := _error_of(message, self.keys, column, template):
                return problem
        roles = {message["role"] for message in messages}
        if column != "prompt" and "assistant" not in roles and roles <= _KNOWN_ROLES:
            return f"has no message of the assistant in {column!r}"
        return ""


@dataclass
class Tally:
    """Errors and warnings about the rows of a dataset, each with its rows, counted from 1."""

    name: str
    errors: dict[str, list[int]] = field(default_factory=dict)
    warnings: dict[str, list[int]] = field(default_factory=dict)

    def add(self, row: int, error: str, warning: str) -> None:
        """Record the problems of a row; an empty text is no problem."""
        for found, problem in ((self.errors, error), (self.warnings, warning)):
            if problem:
                found.setdefault(problem, []).append(row)

    def sentences(self, found: dict[str, list[int]]) -> list[str]:
        """Return a sentence for each of the first ten errors or warnings, with its first rows."""
        return [
            f"Row {rows[0]:,} of {self.name} {problem}"
            + (f" ({len(rows):,} rows: {listed(f'{row:,}' for row in rows)})." if len(rows) > 1 else ".")
            for problem, rows in list(found.items())[:10]
        ]


def chatml(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, from either format, with the keys and roles that chat templates know."""
    if message.get("role") is not None:
        return dict(message)
    named = {KEYS.get(key, key): value for key, value in message.items() if key not in CHATML}
    role = named["role"]
    return {**named, "role": {"human": "user", "gpt": "assistant"}.get(role, role)}


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a sound message: its content, or the texts of its parts; empty without content."""
    content = message.get("content") or []
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def is_conversation(value: Any, keys: tuple[str, str]) -> bool:
    """Tell whether `value` is a list of messages; a message that calls tools may have no content."""
    return _all_have(value, keys[0]) and any(keys[1] in message for message in value)


def picture_names(value: Any) -> list[str]:
    """Return the names of files in a value of a column of pictures; a picture itself has none."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def picture_error(row: Mapping[str, Any], folder: Path) -> str:
    """Return the error in the names of a row's pictures, as words to follow the row's number, or "".

    The names are relative to the `folder`.
    """
    for column in (one for one in PICTURES if one in row):
        if row[column] is None:
            return f"has no {column!r}" + ("; without a picture it is []" if column == "images" else "")
        for name in picture_names(row[column]):
            if not (folder / name).is_file():
                return f"names a picture that is not here: {name!r}"
    return ""


def class_of(said: Any, labels: Sequence[str]) -> int | None:
    """Return the number of the class that a row names, or None if that is uncertain.

    A class is written as its name, or as its number from 0. If any name is a number, only names count: in
    `labels: ["1", "2"]`, 1 is the first class. JSON's true and false mean the names `true` and `false`, in
    small letters or capitals.
    """
    if isinstance(said, bool):
        named = [number for number, name in enumerate(labels) if name.lower() == str(said).lower()]
        return named[0] if len(named) == 1 else None
    if not isinstance(said, int | float | str):
        return None
    whole = int(said) if isinstance(said, float) and said.is_integer() else said
    for text in (str(said), str(whole)):
        if text in labels:
            return labels.index(text)
    written = re.fullmatch(r"(0|[1-9]\d{0,8})(\.0+)?", str(whole))
    if written is None or any(map(_reads_as_number, labels)) or int(written[1]) >= len(labels):
        return None
    return int(written[1])


def label_error(said: Any, labels: Sequence[str]) -> str:
    """Return the error in a row's class, as words to follow the row's number, or ""."""
    if class_of(said, labels) is not None:
        return ""
    written = "no label" if said is None else f"the label {kind_of(said)}"
    return f"has {written}, and `seq_cls.labels` names {len(labels)} classes: {listed(labels)}"


def broken_row(name: str, row: int, problem: str, hint: str = MEND_A_ROW) -> AssetError:
    """Make the error for a row, counted from 1, that a trainer could not read."""
    return AssetError(f"Row {row:,} of {name} {problem}.", hint)


def listed(names: Iterable[str]) -> str:
    """Join names for a message; only the first ten are shown."""
    names = list(names)
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def _all_have(value: Any, key: str) -> bool:
    """Tell whether `value` is a non-empty list of mappings that all have a text under `key`."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, dict) and isinstance(one.get(key), str) for one in value)


def _error_of(message: dict[str, Any], keys: tuple[str, str], column: str, template: str | None) -> str:
    role = message["role"]
    content = message.get("content")
    is_named = template is None or re.search(f"['\"]{re.escape(role)}['\"]", template)
    if role not in _KNOWN_ROLES and not is_named:
        return _unknown_role(role, column)
    if not isinstance(content, str | None) and not _are_parts(content):
        return _no_text(content, keys[1], column)
    if content is None and not _says_something(message):
        said = [key for key, value in message.items() if value is not None and key not in CHATML]
        instead = f" but with {listed(said)}" if said else ""
        return f"has a message without {keys[1]!r}{instead} in {column!r}"
    return ""


def _unknown_role(role: str, column: str) -> str:
    return f"has an unknown role {role!r} in {column!r} (known: system, user, assistant, tool)"


def _no_text(content: Any, key: str, column: str) -> str:
    return f"has {kind_of(content)} as a message's {key!r} in {column!r}, not text"


def _are_parts(content: Any) -> bool:
    """Tell whether a content is a list of `{type: text, text: ...}`, which some chat templates read."""
    return _all_have(content, "text") and all(part.get("type") == "text" for part in content)


def _says_something(message: dict[str, Any]) -> bool:
    instead = ("tool_calls", "function_call", "reasoning_content", "thinking")
    return any(map(str.strip, texts_of(message))) or any(map(message.get, instead))


def _reads_as_number(name: str) -> bool:
    return re.fullmatch(r"[-+]?\d+(\.\d*)?", name.strip()) is not None
