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


def changes(message: Message, *others: Message) -> Iterator[tuple[str, Change]]:
    """Say what a change does, and do it to any message of the type.

    Args:
        message: whole.
        others: of the same type, from which a field may be taken.
    """
    for field in message.DESCRIPTOR.fields:
        name = field.name
        yield f"no {name}", lambda it, name=name: it.ClearField(name)
        if hasattr(getattr(message, name), "extend"):
            yield from _changed_lists(field, others)
            if field.cpp_type == Field.CPPTYPE_MESSAGE and (items := getattr(message, name)):
                theirs = [first for other in others for first in getattr(other, name)[:1]]
                for what, change in changes(items[0], *theirs):
                    yield (
                        f"{name}[0]: {what}",
                        lambda it, name=name, change=change: change(getattr(it, name)[0]),
                    )
        elif field.cpp_type == Field.CPPTYPE_MESSAGE:
            theirs = [getattr(other, name) for other in others]
            for what, change in changes(getattr(message, name), *theirs):
                yield f"{name}: {what}", lambda it, name=name, change=change: change(getattr(it, name))
        else:
            values = [*_values(field, getattr(message, name)), *(getattr(other, name) for other in others)]
            for value in values:
                yield f"{name}={str(value)[:40]}", lambda it, name=name, value=value: setattr(it, name, value)


def _values(field: Field, own: Any) -> list[Any]:
    if field.type != Field.TYPE_BYTES:
        return VALUES[field.cpp_type]
    return [b"", b"\0", own[:-1], own + b"\0", own[::-1], bytes(len(own)), b"x" * LONGEST]


def _changed_lists(field: Field, others: tuple[Message, ...]) -> Iterator[tuple[str, Change]]:
    name = field.name

    def change(edit: Callable[[list[Any]], Any]) -> Change:
        def apply(message: Message) -> None:
            items = list(getattr(message, name))
            edited = edit(items)
            del getattr(message, name)[:]
            getattr(message, name).extend(items if edited is None else edited)

        return apply

    yield f"{name} without the first", change(lambda items: items[1:])
    yield f"{name} without the last", change(lambda items: items[:-1])
    yield f"{name} with the first twice", change(lambda items: items[:1] + items)
    yield f"{name} with the last twice", change(lambda items: items + items[-1:])
    yield f"{name} turned round", change(lambda items: items[::-1])
    yield f"{name} a thousand times", change(lambda items: items * 1000)
    for number, other in enumerate(others):
        theirs = list(getattr(other, name))
        yield f"{name} of another ({number})", change(lambda items, theirs=theirs: theirs)
    if field.cpp_type == Field.CPPTYPE_MESSAGE:
        return
    plain = b"" if field.type == Field.TYPE_BYTES else 0
    for place in (0, -1):
        for value in _values(field, plain):

            def put(items: list[Any], place: int = place, value: Any = value) -> None:
                if items:
                    items[place] = value

            yield f"{name}[{place}]={str(value)[:40]}", change(put)
