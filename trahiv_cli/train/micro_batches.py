"""A batch in parts, one after the other, where memory does not suffice for all of it at once.

Each part is announced and weighed as a batch of its own (`weights.py`), so that the parts together count
for what the whole would have counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def split(
    batch: Mapping[str, Any], batch_size: int, num_parts: int
) -> list[tuple[int, dict[str, Any]]] | None:
    """Divide a batch by its samples.

    Args:
        batch: as the collator made it. What has a row for each sample is divided; what has two, as TRL's
            pairs of texts, has the first of each sample before the second of any.
        batch_size: samples in it.
        num_parts: into how many parts of equal size, as far as that goes.

    Returns:
        How many samples each part has, and the part, a view of the batch where that is possible; None if the
        batch has fewer samples, or something in it has other rows: samples that are packed into one row,
        images of several pieces.
    """
    if num_parts == 1:
        return [(batch_size, dict(batch))]
    if batch_size < num_parts:
        return None
    rows = {name: len(value) for name, value in batch.items() if _has_rows(value)}
    if not rows or set(rows.values()) - {batch_size, 2 * batch_size}:
        return None
    borders = [batch_size * part // num_parts for part in range(num_parts + 1)]
    parts = []
    for start, stop in zip(borders, borders[1:], strict=False):
        part = dict(batch)
        for name, num_rows in rows.items():
            value = batch[name]
            part[name] = value[start:stop]
            if num_rows == 2 * batch_size:
                part[name] = _joined(part[name], value[batch_size + start : batch_size + stop])
        parts.append((stop - start, part))
    return parts


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def _joined(first: Any, second: Any) -> Any:
    return torch.cat([first, second]) if isinstance(first, torch.Tensor) else first + second
