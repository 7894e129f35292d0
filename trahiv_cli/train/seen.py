"""What a preview says: samples as the model sees them, and figures over more of them."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BINS = 8
"""Most bins of a histogram; samples that are cut have a bin of their own."""

Tokens = list[tuple[int, bool]]
"""What the model takes at once: each token's id, and whether it is trained."""


class Piece(NamedTuple):
    """Some text of a sample: all of it trained or none, and all of it special tokens or none."""

    text: str
    is_trained: bool
    is_special: bool = False


class Part(NamedTuple):
    """A stretch of a sample: all of it, an answer of two, one of several samples in a packed row."""

    name: str  # what the part is, or empty if there is only one
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Bin:
    """How many have from `first` to `last` tokens, both included; without end if `last` is None."""

    first: int
    last: int | None
    count: int


def num_trained(tokens: Tokens) -> int:
    """Count the trained ones."""
    return sum(is_trained for _, is_trained in tokens)


@dataclass(frozen=True)
class Sample:
    """One sample as the model takes it: cut, and with packing a whole row."""

    parts: tuple[Part, ...]
    num_tokens: int
    num_trained: int
    num_cut: int = 0  # tokens that were cut off; of `clm`, `mlm` and `seq-cls` it is not known
    is_left_out: bool = False  # nothing of it is trained once it is cut, so TRL leaves it out

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("text", "trained", "special")
        parts = [
            {"name": name, "pieces": [dict(zip(names, piece, strict=True)) for piece in pieces]}
            for name, pieces in self.parts
        ]
        return {
            "tokens": self.num_tokens,
            "trained_tokens": self.num_trained,
            "cut_tokens": self.num_cut,
            "left_out": self.is_left_out,
            "parts": parts,
        }


@dataclass(frozen=True)
class Preview:
    """Some samples, and figures over those that were looked at."""

    name: str
    task: str
    max_length: int
    setting: str  # the recipe's key of `max_length`: `sft.max_length`
    num_samples: int | None  # in all, for `sft` before packing; unknown of a stream
    samples: tuple[Sample, ...]
    num_looked_at: int

    length_of: str  # what has `lengths`: a `sample`, or a `document` where several become one sample
    lengths: tuple[int, ...]  # tokens before anything is cut or packed; of `dpo` with the longer answer
    num_cut: int | None
    """How many of `lengths` exceed `max_length`, and are cut. None where the rest goes into the next row."""

    num_untrained: int | None
    """Samples looked at that train nothing once they are cut. None where that can't happen or be told."""

    num_rows: int  # what the model gets of the samples that were looked at: with packing, fewer
    num_tokens: int  # in these rows
    num_trained: int  # of `num_tokens`; none of `seq-cls`, which learns a class for each row
    is_packed: bool
    classes: dict[str, int] = field(default_factory=dict)
    """Class -> samples of it, in the recipe's order; for `seq-cls` alone."""

    @property
    def trained_share(self) -> float:
        """Share of the tokens that the loss is computed on, from 0 to 1."""
        return self.num_trained / self.num_tokens if self.num_tokens else 0.0

    @property
    def packing_efficiency(self) -> float | None:
        """Share of the rows that is filled, from 0 to 1; None without packing."""
        if not self.is_packed or not self.num_rows:
            return None
        return self.num_tokens / (self.num_rows * self.max_length)

    def histogram(self) -> list[Bin]:
        """Count `lengths` in bins as wide as a power of 2; what is cut has a bin of its own, the last."""
        if not self.lengths:
            return []
        limit = self.max_length if self.num_cut else max(self.lengths)
        kept = [length for length in self.lengths if length <= limit]
        longest, width = max(kept, default=0), 1
        while longest > BINS * width:
            width *= 2
        counts = Counter((length - 1) // width for length in kept)
        bins = [
            Bin(number * width + 1, min((number + 1) * width, limit), counts[number])
            for number in range((min(kept, default=1) - 1) // width, -(-longest // width))
        ]
        cut = len(self.lengths) - len(kept)
        return [*bins, Bin(limit + 1, None, cut)] if cut else bins

    def to_data(self) -> dict[str, Any]:
        """Return the fields of the `preview` event; null is what is not known or does not apply."""
        efficiency = self.packing_efficiency
        return {
            "name": self.name,
            "task": self.task,
            "max_length": self.max_length,
            "num_samples": self.num_samples,
            "looked_at": self.num_looked_at,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "trained_tokens": None if self.classes else self.num_trained,
            "trained_share": None if self.classes else round(self.trained_share, 4),
            "untrained_samples": self.num_untrained,
            "cut_samples": self.num_cut,
            "packing_efficiency": None if efficiency is None else round(efficiency, 4),
            "classes": self.classes or None,
            "lengths": {
                "of": self.length_of,
                "count": len(self.lengths),
                "shortest": min(self.lengths, default=None),
                "median": statistics.median_low(self.lengths) if self.lengths else None,
                "longest": max(self.lengths, default=None),
                "histogram": [[each.first, each.last, each.count] for each in self.histogram()],
            },
            "samples": [sample.to_data() for sample in self.samples],
        }


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> tuple[Piece, ...]:
    """Decode tokens in runs that are trained or not, special or not; together they are the whole text.

    A token alone may be a part of a character, or lose the space before it. So each time everything is
    decoded, from the start to the end of a run; what that has in common with the whole text is what the
    runs so far have said. A character whose bytes are in two runs belongs to the later one.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)

    def decoded(some: Tokens) -> str:
        ids = [number for number, _ in some]
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    text, pieces, start, end = decoded(tokens), [], 0, 0
    for kind, run in itertools.groupby((is_trained, number in special) for number, is_trained in tokens):
        end += len(list(run))
        stop = len(text)
        if end < len(tokens):
            stop = max(start, len(os.path.commonprefix([decoded(tokens[:end]), text])))
        if stop > start:
            pieces.append(Piece(text[start:stop], *kind))
        start = stop
    return tuple(pieces)


def parts_of(
    tokenizer: PreTrainedTokenizerBase, tokens: Tokens, ends: Sequence[int], what: str
) -> tuple[Part, ...]:
    """Decode tokens in parts, which are `what 1`, `what 2`, ...; nameless if it is only one.

    `ends` are how many tokens there are up to the end of each.
    """
    bounds = sorted({0, *ends, len(tokens)})
    parts = [pieces_of(tokenizer, tokens[first:last]) for first, last in itertools.pairwise(bounds)]
    if len(parts) == 1:
        return (Part("", parts[0]),)
    return tuple(Part(f"{what} {number}", pieces) for number, pieces in enumerate(parts, 1))
