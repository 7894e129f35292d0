"""What a member that lies may put into a field: the values, and the messages with one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trahiv_cli.optim.history import MOST_SAMPLES, MOST_STEPS
from trahiv_cli.optim.ledger import MAX_POSITION, SHARD
from trahiv_cli.optim.pace import MOST_RATE
from trahiv_cli.swarm.clock import EARLIEST_S, LATEST_S
from trahiv_cli.swarm.snapshot import MAX_RANK

BOUNDS = {MOST_SAMPLES, MOST_STEPS, MAX_POSITION, SHARD, MOST_RATE, EARLIEST_S, LATEST_S, MAX_RANK, 2**31}
"""Of fields: the largest number that is taken, or the smallest."""

VALUES = [
    *(0, -1, 1, *sorted(BOUNDS), *sorted(bound + 1 for bound in BOUNDS), 2**63, 2**64 - 1, True, None),
    *(1.5, 1e308, math.nan, math.inf, -math.inf),
    *("", "x" * 4096, b"", b"x" * 4096, [], {}, [0, 2**62], {"": 0}),
]

Path = tuple[Any, ...]


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Where all fields of a message are, those of its parts included."""
    yield path
    inner = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def changes(tree: Any, path: Path, *others: Any) -> Iterator[Any]:
    """The message with one field changed, missing, or twice; or as it is in others that have it."""
    if not path:
        yield from VALUES
        yield from others
        return
    first, *rest = path
    theirs = [other[first] for other in others if has(other, first)]
    if rest:
        inner = changes(tree[first], tuple(rest), *theirs)
    else:
        inner = iter([*VALUES, *theirs])
        if isinstance(tree, list):
            yield [*tree[:first], *tree[first + 1 :]]
            yield [*tree[: first + 1], *tree[first:]]
        else:
            yield {key: value for key, value in tree.items() if key != first}
    for value in inner:
        yield (
            [*tree[:first], value, *tree[first + 1 :]] if isinstance(tree, list) else tree | {first: value}
        )


def has(tree: Any, key: Any) -> bool:
    """Whether there is such a field."""
    if isinstance(tree, list):
        return isinstance(key, int) and key < len(tree)
    return isinstance(tree, dict) and key in tree


def lies(tree: Any, *others: Any) -> Iterator[tuple[str, Any]]:
    """Every field of a message with every value: what it is, and the message."""
    for path in places(tree):
        for changed in changes(tree, path, *others):
            yield f"{'.'.join(map(str, path)) or 'all of it'}: {str(value_at(changed, path))[:60]}", changed


def value_at(tree: Any, path: Path) -> Any:
    """What stands in a field; None if it is missing."""
    for key in path:
        if not has(tree, key):
            return None
        tree = tree[key]
    return tree
