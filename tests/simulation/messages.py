"""Every field of a protobuf message with every value that a member that lies may put there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

Change = Callable[[Message], None]

LONGEST = 2**16
"""Bytes of a field that is far longer than it can be; a message is refused at 4 MiB."""

VALUES = {
    Field.CPPTYPE_INT32: [0, -1, 1, 2**31 - 1, -(2**31)],
    Field.CPPTYPE_UINT32: [0, 1, 2**31, 2**32 - 1],
    Field.CPPTYPE_DOUBLE: [0.0, -1.0, 1.0, 2.0**62, 2.0**64, 1e308, math.nan, math.inf, -math.inf],
    Field.CPPTYPE_BOOL: [False, True],
    Field.CPPTYPE_ENUM: [*range(8), 99],
    Field.CPPTYPE_STRING: ["", "x", "x" * LONGEST],
}

LISTS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "without the first": lambda items: items[1:],
    "without the last": lambda items: items[:-1],
    "with the first twice": lambda items: items[:1] + items,
    "with the last twice": lambda items: items + items[-1:],
    "turned round": lambda items: items[::-1],
    "a thousand times": lambda items: items * 1000,
}


def changes(message: Message, *others: Message) -> Iterator[tuple[str, Change]]:
    """Say what a change does, and do it to any message of the type.

    Args:
        message: whole.
        others: of the same type, from which a field may be taken.
    """
    for field in message.DESCRIPTOR.fields:
        name = field.name
        own, *theirs = (getattr(one, name) for one in (message, *others))
        yield f"no {name}", lambda it, name=name: it.ClearField(name)
        if hasattr(own, "extend"):
            edits = LISTS | {f"of another ({n})": lambda _, it=it: it for n, it in enumerate(theirs)}
            if field.cpp_type != Field.CPPTYPE_MESSAGE:
                for value in _values(field, b"" if field.type == Field.TYPE_BYTES else 0):
                    edits[f"begins with {value}"[:40]] = lambda items, value=value: [value, *items[1:]]
                    edits[f"ends in {value}"[:40]] = lambda items, value=value: [*items[:-1], value]
            for what, edit in edits.items():
                yield f"{name} {what}", lambda it, name=name, edit=edit: _put(it, name, edit)
            if field.cpp_type == Field.CPPTYPE_MESSAGE and own:
                for what, change in changes(own[0], *(other[0] for other in theirs if other)):
                    yield f"{name}[0]: {what}", lambda it, n=name, change=change: change(getattr(it, n)[0])
        elif field.cpp_type == Field.CPPTYPE_MESSAGE:
            for what, change in changes(own, *theirs):
                yield f"{name}: {what}", lambda it, name=name, change=change: change(getattr(it, name))
        else:
            for value in (*_values(field, own), *theirs):
                yield f"{name}={str(value)[:40]}", lambda it, name=name, value=value: setattr(it, name, value)


def _put(message: Message, name: str, edit: Callable[[list[Any]], list[Any]]) -> None:
    items = edit(list(getattr(message, name)))
    del getattr(message, name)[:]
    getattr(message, name).extend(items)


def _values(field: Field, own: Any) -> list[Any]:
    if field.type != Field.TYPE_BYTES:
        return VALUES[field.cpp_type]
    return [b"", b"\0", own[:-1], own + b"\0", own[::-1], bytes(len(own)), b"x" * LONGEST]
