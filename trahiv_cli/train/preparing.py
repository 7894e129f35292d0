"""What happens while TRL makes tokens of a dataset, in words that name the recipe's keys.

TRL tokenizes `sft` and `dpo` when a trainer is made. What it raises and logs then speaks of its own
arguments; who wrote a recipe has to know which of its keys to change. What is not known here passes through
as TRL said it.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from datasets.exceptions import DatasetsError
from jinja2 import TemplateError

from trahiv_cli.assets.collators import IGNORED_LABEL
from trahiv_cli.assets.memory import is_out_of_memory
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import Recipe, section_of

LOOKED_AT = 100
"""Samples that are looked at before training begins, whether they train anything."""

LOOK = "`trahiv preview RECIPE` shows samples"

Tell = Callable[[str, str], None]
"""Takes a message and a hint."""


@dataclass(frozen=True)
class _Said:
    """Something that TRL or a chat template says, known by a part of it, and what it means here.

    `{}` in `message` stands for what `detail` finds in the original.
    """

    part: str
    message: str
    hint: str
    detail: str = ""

    def reworded(self, text: str) -> tuple[str, str]:
        found = re.search(self.detail, text, re.DOTALL) if self.detail else None
        return self.message.replace("{}", found[1] if found else "its end"), self.hint


_MARK = "`sft.assistant_only_loss: false`, or a `data.chat_template` that marks what the assistant says"

_ERRORS = (
    _Said(
        "missing prefix-preservation or `{% generation %}`",
        "`sft.assistant_only_loss` is on, and the chat template marks no assistant tokens "
        "({% generation %} ... {% endgeneration %}).",
        _MARK,
    ),
    _Said(
        "at least one example has no assistant tokens",
        "`sft.assistant_only_loss` is on, and at least one conversation has no tokens of the assistant: "
        "nobody answers in it, or the chat template marks something else ({% generation %}).",
        f"Remove such conversations; or {_MARK}.",
    ),
    _Said(
        "but the dataset is not conversational",
        "`sft.assistant_only_loss` is on, and the dataset has texts instead of conversations.",
        "`sft.assistant_only_loss: false`",
    ),
    _Said(
        "tokenizer.chat_template is not set",
        "The data are conversations, and the tokenizer has no chat template to write them with.",
        "`data.chat_template: FILE.jinja`, or a `model.tokenizer_name_or_path` that has one",
    ),
)

_WARNINGS = (
    _Said(
        "end-of-turn token in the loss mask",
        "The chat template does not mark the token that ends the assistant's turn: the model may not learn "
        "to stop, and the loss will not show it.",
        "Move `{% endgeneration %}` behind that token in `data.chat_template`, or "
        "`sft.assistant_only_loss: false`.",
    ),
    _Said(
        "tokenized prompt is not a prefix",
        "The prompt alone becomes other tokens than the prompt with its answer. What is trained begins where "
        "they part, and the prompt's end {} is missing: the model will be asked in another way than it "
        "learnt.",
        "End prompts where a token ends (mostly: without a space), or use a `data.chat_template` that writes "
        "prompts alike in both cases.",
        detail=r"left out of the training sequence: (.*?)\. The model is trained",
    ),
)


@contextmanager
def preparing() -> Iterator[None]:
    """Turn what TRL raises while it tokenizes a dataset into an `AssetError`."""
    try:
        yield
    except (ValueError, RuntimeError, DatasetsError) as failure:
        if is_out_of_memory(failure):
            raise
        root = failure.__cause__ or failure
        reason = " ".join(str(root).split()) or type(root).__name__
        for said in _ERRORS:
            if said.part in reason:
                raise AssetError(*said.reworded(reason)) from failure
        raise AssetError(f"The data could not be prepared: {reason}", LOOK) from failure
    except TemplateError as failure:
        raise _unwritable(failure) from failure
    except (TypeError, LookupError, AttributeError) as failure:
        if not _is_raised_in_template(failure):
            raise
        raise _unwritable(failure) from failure


def _unwritable(failure: Exception) -> AssetError:
    return AssetError(
        f"The chat template can't write a conversation of the data: {failure}",
        "Fix that conversation, or give another template (`data.chat_template: FILE.jinja`).",
    )


def _is_raised_in_template(failure: Exception) -> bool:
    """Whether it is a template's mistake, or the data's, and not one of ours: Jinja names the place so."""
    frames = traceback.extract_tb(failure.__traceback__)
    return any(frame.filename == "<template>" for frame in frames)


@contextmanager
def heeding(tell: Tell) -> Iterator[None]:
    """While the block runs, pass on what TRL warns of.

    TRL says some of it once in a process, and nothing of samples that come out of the cache of `datasets`.

    Args:
        tell: called once with each message and its hint, in the thread that prepares.
    """
    handler = _Handler(tell)
    logger = logging.getLogger("trl")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"^\[RANK \d+\] ", "", record.getMessage())
        if text not in self._told:
            self._told.add(text)
            known = (said.reworded(text) for said in _WARNINGS if said.part in text)
            self._tell(*next(known, (text, LOOK)))


def require_trained_tokens(recipe: Recipe, samples: Any) -> None:
    """Refuse data whose first samples train nothing: the loss would be 0 or NaN, and the GPU hours lost.

    Args:
        recipe: its task names the key to change.
        samples: as the trainer has them, tokenized: a `Dataset` or an `IterableDataset`.

    Raises:
        AssetError: there is no sample at all, none of the first hundred trains a token, or one of these can't
            be prepared.
    """
    with preparing():
        first = list(itertools.islice(samples, LOOKED_AT))
    if any(map(_trains, first)):
        return
    section = section_of(recipe.task)
    max_length = getattr(recipe, section or "").max_length
    hint = f"Raise `{section}.max_length` (it is {max_length}), or shorten the prompts; {LOOK}."
    if not first:
        raise AssetError(
            f"No sample is left to train on: at {max_length} tokens, each was cut off before its answer.",
            hint,
        )
    which = (
        "the first sample trains no token"
        if len(first) == 1
        else f"none of the first {len(first)} samples trains a token"
    )
    raise AssetError(
        f"There is nothing to learn: {which}. All in them is prompt, or was cut off at {max_length} tokens.",
        hint,
    )


def _trains(sample: dict[str, Any]) -> bool:
    """Whether the loss is computed on anything of a sample.

    `labels` are one class, or one for each token; the first token of each sequence in a row is nobody's next.
    Without labels (`clm`, `mlm`) every token may be asked for.
    """
    if "chosen_ids" in sample:
        return bool(sample["chosen_ids"] and sample["rejected_ids"])
    labels = sample.get("labels")
    if labels is None or isinstance(labels, int):
        return True
    starts = {0, *itertools.accumulate(sample.get("seq_lengths") or ())}
    return any(label != IGNORED_LABEL and place not in starts for place, label in enumerate(labels))
