"""From tokens back to text, so that it shows which of it is trained."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from trahiv_cli.train.seen import Part, Piece


@dataclass(frozen=True)
class Tokens:
    """What the model takes at once, and whether each token of it is trained."""

    ids: list[int]
    trained: list[bool]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, some: slice) -> Tokens:
        return Tokens(self.ids[some], self.trained[some])

    @property
    def num_trained(self) -> int:
        """How many of them are trained."""
        return sum(self.trained)


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> tuple[Piece, ...]:
    """Decode tokens in runs that are trained or not, special or not.

    A token alone may be a part of a character, or lose the space before it. So each time everything is
    decoded, from the start to the end of a run; what that has in common with the whole text is what the
    runs so far have said. A character whose bytes are in two runs belongs to the later one.

    Returns:
        Pieces that together are the whole text, special tokens included.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    kinds = [
        (is_trained, token in special) for token, is_trained in zip(tokens.ids, tokens.trained, strict=True)
    ]
    text = _decoded(tokenizer, tokens.ids)
    pieces, start, end = [], 0, 0
    for (is_trained, is_special), run in itertools.groupby(kinds):
        end += len(list(run))
        stop = len(text)
        if end < len(kinds):
            said = _decoded(tokenizer, tokens.ids[:end])
            stop = max(start, len(os.path.commonprefix([said, text])))
            if text[stop : stop + 1] == " " and not _begins_with_space(tokenizer, tokens.ids[end]):
                stop += 1
        if stop > start:
            pieces.append(Piece(text[start:stop], is_trained, is_special))
        start = stop
    return tuple(pieces)


def split(
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


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _begins_with_space(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether the space before a token is its own; WordPiece's decoder puts in some that are no token's."""
    return tokenizer.convert_ids_to_tokens(token).startswith(("▁", "Ġ", " "))
