"""While TRL makes tokens of a dataset: its errors end a run in good order, and its warnings are passed on.

TRL tokenizes `sft` and `dpo` when a trainer is made.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def preparing() -> Iterator[None]:
    """Turn what TRL raises while it tokenizes a dataset into an `AssetError`."""
    try:
        yield
    except (TemplateError, TypeError, LookupError, AttributeError) as failure:
        # A template's mistake, or the data's, and not one of ours: Jinja names the file so.
        frames = traceback.extract_tb(failure.__traceback__)
        is_of_template = any(frame.filename == "<template>" for frame in frames)
        if not isinstance(failure, TemplateError) and not is_of_template:
            raise
        raise AssetError(
            f"The chat template can't write a conversation of the data: {failure}",
            "Fix that conversation, or give another template (`data.chat_template: FILE.jinja`).",
        ) from failure
    except (ValueError, RuntimeError, DatasetsError) as failure:
        if is_out_of_memory(failure):
            raise
        root = failure.__cause__ or failure
        reason = " ".join(str(root).split()) or type(root).__name__
        hint = f"Change the data, `data.chat_template` or `sft.assistant_only_loss`; {LOOK}."
        raise AssetError(f"The data could not be prepared: {reason}", hint) from failure


@contextmanager
def heeding(tell: Tell) -> Iterator[None]:
    """While the block runs, pass on what TRL warns of, each message once and with a hint.

    TRL says some of it once in a process, and nothing of samples that come out of the cache of `datasets`.
    """
    told: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = re.sub(r"^\[RANK \d+\] ", "", record.getMessage())
            if text not in told:
                told.add(text)
                tell(text, LOOK)

    handler, logger = Handler(logging.WARNING), logging.getLogger("trl")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def require_trained_tokens(recipe: Recipe, samples: Any) -> None:
    """Refuse data whose first samples train nothing: the loss would be 0 or NaN, and the GPU hours lost.

    Raises:
        AssetError: there is no sample, none of the first hundred, tokenized as they are, trains a token, or
            one of these can't be prepared.
    """
    with preparing():
        first = list(itertools.islice(samples, LOOKED_AT))
    if any(map(_trains, first)):
        return
    section = section_of(recipe.task)
    max_length = getattr(recipe, section or "").max_length
    why = f"There is nothing to learn: none of the first {len(first)} samples trains a token. "
    why += f"All in them is prompt, or was cut off at {max_length} tokens."
    if not first:
        why = f"No sample is left to train on: at {max_length} tokens, each was cut off before its answer."
    hint = f"Raise `{section}.max_length` (it is {max_length}), or shorten the prompts; {LOOK}."
    raise AssetError(why, hint)


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
    return any(label != IGNORED_LABEL and index not in starts for index, label in enumerate(labels))
