"""What a member that lies may put into a field: the values, and the messages with one of them."""

import math

from trahiv_cli.clock import EARLIEST_S, LATEST_S
from trahiv_cli.progress.history import MOST_SAMPLES, MOST_STEPS
from trahiv_cli.progress.ledger import MAX_POSITION, SHARD
from trahiv_cli.progress.pace import MOST_RATE
from trahiv_cli.state.snapshot import MAX_RANK

BOUNDS = {MOST_SAMPLES, MOST_STEPS, MAX_POSITION, SHARD, MOST_RATE, EARLIEST_S, LATEST_S, MAX_RANK, 2**31}
"""Of fields: the largest number that is taken, or the smallest."""

VALUES = [
    *(0, -1, 1, *sorted(BOUNDS), *sorted(bound + 1 for bound in BOUNDS), 60_000, 2**63, 2**64 - 1),
    *(True, None),
    *(1.5, 1e308, math.nan, math.inf, -math.inf),
    *("", "x" * 4096, b"", b"x" * 4096, [], {}, [0, 2**62], {"": 0}),
]

OF_A_KIND = {
    bytes: {
        "cut": lambda own: own[:-1],
        "longer": lambda own: own + b"\0",
        "turned round": lambda own: own[::-1],
        "nothing but zeros": lambda own: bytes(len(own)),
    },
    list: {"turned round": lambda own: own[::-1], "a thousand times": lambda own: own * 1000},
}


class Code(int):
    """A number of an enumeration; the others are tried, too."""


class Repeated(list):
    """Elements of one kind, of which the first and the last are changed."""


def edits(tree, *others):
    """Every field of a message with every value: what it is, and what does it to any message of the kind.

    Args:
        tree: the message, of dictionaries and lists, whole.
        others: messages of the same kind, from which a field may be taken.
    """
    values = [*VALUES, *others, *(range(8) if isinstance(tree, Code) else ())]
    for value in values:
        yield f": {str(value)[:60]}", lambda _, value=value: value
    for kind, of_kind in OF_A_KIND.items():
        if isinstance(tree, kind):
            yield from ((f": {what}", edit) for what, edit in of_kind.items())
    inner = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in inner:
        if isinstance(tree, Repeated) and 0 < key < len(tree) - 1:
            continue
        yield f"{key}: missing", lambda it, key=key: put(it, key, lambda own: [])
        if isinstance(tree, list):
            yield f"{key}: twice", lambda it, key=key: put(it, key, lambda own: [own, own])
        for what, edit in edits(value, *(other[key] for other in others if has(other, key))):
            name = f"{key}{what}" if what.startswith(":") else f"{key}.{what}"
            yield name, lambda it, key=key, edit=edit: put(it, key, lambda own: [edit(own)])


def put(tree, key, edit):
    """The message with what comes of one of its fields in its place: nothing, one, or in a list more."""
    if not has(tree, key):
        return tree
    instead = edit(tree[key])
    if isinstance(tree, list):
        return [*tree[:key], *instead, *tree[key + 1 :]]
    return tree | {key: instead[0]} if instead else {one: tree[one] for one in tree if one != key}


def has(tree, key):
    """Whether there is such a field."""
    if isinstance(tree, list):
        return isinstance(key, int) and key < len(tree)
    return isinstance(tree, dict) and key in tree


def lies(tree, *others):
    """The message with every edit: what that is, and what comes of it."""
    return ((what, edit(tree)) for what, edit in edits(tree, *others))


def message_edits(message, *others):
    """Every field of a protobuf message with every value that it can have; see `edits`."""
    kind = type(message)
    for what, edit in edits(tree_of(message), *map(tree_of, others)):

        def change(it, edit=edit):
            return kind(**edit(tree_of(it)))

        try:
            change(message)
        except (TypeError, ValueError, OverflowError):
            continue  # a field can't have that value
        yield what, change


def tree_of(message):
    """The fields of a protobuf message and of its parts, as its constructor takes them."""

    def value_of(field, value):
        if field.message_type:
            return tree_of(value)
        return Code(value) if field.enum_type else value

    tree = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_list = hasattr(value, "extend")
        own = Repeated(value_of(field, one) for one in value) if is_list else value_of(field, value)
        tree[field.name] = own
    return tree
