"""The columns that a dataset must have for its task, and the errors if it lacks them.

The rules work on rows as plain data: `assets/` reads all rows with `datasets`, and `examine.py` reads the
first rows of local files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.paths import closest
from trahiv_cli.recipe.rows import CHATML, SHAREGPT, Form, is_conversation, listed
from trahiv_cli.recipe.schema import DatasetSection, Recipe
from trahiv_cli.recipe.task_sections import TRL_REWARDS, GrpoSection, SftSection


@dataclass(frozen=True)
class Table:
    """A dataset whose first row was read."""

    name: str  # its path in quotes, for messages
    place: str  # its entry in the recipe: `data.datasets.0`
    first: dict[str, Any]  # the first row; its keys are the columns


def sft_form(table: Table, sft: SftSection) -> Form:
    """Find the first form that a dataset has: an answer to a prompt, a conversation, or a text.

    Raises:
        AssetError: the dataset has none, or the loss needs a part that this form lacks.
    """
    forms = [("prompt", "completion"), ("messages",), ("conversations",), (sft.dataset_text_field,)]
    columns = next((form for form in forms if all(column in table.first for column in form)), None)
    if columns is None:
        text = f"a text column ({sft.dataset_text_field!r}, `sft.dataset_text_field`)"
        is_preference = table.first.keys() >= {"chosen", "rejected"}
        hint = "It is a dataset of preferences: set `task: dpo`." if is_preference else ""
        raise _lacks(table, f"`messages`, `prompt` and `completion`, or {text}", hint)
    form = _form(table, columns)
    if columns[0] in ("messages", "conversations") and form.keys is None:
        raise _no_conversation(table, columns[0])
    if form.keys is None and sft.assistant_only_loss:
        raise AssetError(
            f"The dataset {table.name} holds texts, and only in conversations is there an assistant.",
            "Set `sft.assistant_only_loss: false`.",
        )
    if sft.completion_only_loss is True and "completion" not in columns:
        hint = "Set `sft.completion_only_loss: auto`; of conversations, `sft.assistant_only_loss: true`"
        raise _lacks(table, "`completion` to train", f"{hint} trains the answers.")
    return form


def dpo_form(table: Table) -> Form:
    """Find the form of a preference dataset: `chosen` and `rejected`, and `prompt` if there is one.

    Raises:
        AssetError: the dataset lacks these columns, or they do not fit together.
    """
    if not table.first.keys() >= {"chosen", "rejected"}:
        has_answers = table.first.keys() & {"messages", "conversations", "completion"}
        hint = "It is a dataset of answers without preferences: set `task: sft`." if has_answers else ""
        raise _lacks(table, "`chosen` and `rejected`", hint)
    return _form(table, tuple(name for name in ("prompt", "chosen", "rejected") if name in table.first))


def kto_form(table: Table) -> Form:
    """Find the form of a dataset of answers that are good or bad, or of pairs.

    Raises:
        AssetError: the dataset is neither.
    """
    columns = ("prompt", "completion", "label")
    if table.first.keys() >= set(columns):
        return replace(_form(table, columns[:2]), flag="label")
    if table.first.keys() >= {"chosen", "rejected"}:
        return dpo_form(table)
    raise _lacks(table, "`prompt`, `completion` and `label`, or `chosen` and `rejected`")


def grpo_form(table: Table, grpo: GrpoSection) -> Form:
    """Find the form of a dataset of prompts, with the columns that its rewards read.

    Raises:
        AssetError: a column is missing, or a reward reads conversations and the prompts are texts.
    """
    if "prompt" not in table.first:
        raise _lacks(table, "`prompt`")
    form = _form(table, ("prompt",))
    answers = []
    kept: list[str] = []
    for index, reward in enumerate(grpo.rewards):
        is_of_trl = reward.name in TRL_REWARDS
        has_answer = is_of_trl and reward.name.endswith(("accuracy_reward", "cosine_scaled_reward"))
        if form.keys is None and (has_answer or reward.name == "think_format_reward"):
            raise AssetError(
                f"The reward {reward.name!r} reads conversations, and the prompts of {table.name} are texts.",
                "Write prompts as messages, or choose a reward of trahiv's own, such as `regex`.",
            )
        if reward.name in ("exact_match", "number"):
            require_column(table, reward.column, f"grpo.rewards.{index}.column")
            answers.append(reward.column)
        elif has_answer:
            if "solution" not in table.first:
                raise _lacks(table, f"`solution`, which `{reward.name}` reads")
            answers.append("solution")
        elif reward.is_own:  # it may read any column
            kept += [column for column in table.first if column != "prompt"]
    return replace(form, answers=tuple(answers), kept=tuple(dict.fromkeys([*answers, *kept])))


def task_form(table: Table, recipe: Recipe) -> Form | None:
    """Find the form of a dataset for the recipe's task; None if its data is tokenized by trahiv itself."""
    if recipe.sft is not None:
        return sft_form(table, recipe.sft)
    if recipe.dpo is not None or recipe.reward is not None:
        return dpo_form(table)
    if recipe.kto is not None:
        return kto_form(table)
    return None if recipe.grpo is None else grpo_form(table, recipe.grpo)


def require_column(table: Table, column: str, setting: str) -> None:
    """Raise an `AssetError` if `column`, which the recipe names in `setting`, is missing."""
    if column not in table.first:
        near = closest(column, table.first)
        hint = f"Set `{setting}` to {near!r}." if near else f"Set `{setting}`."
        raise _lacks(table, f"column {column!r}", hint)


def require_text(table: Table, column: str, setting: str, *, is_mixed: bool = False) -> None:
    """Raise an `AssetError` if `column` is missing or holds no text; a value may still be null or empty.

    The recipe names it in `setting`. If it `is_mixed`, some rows hold other values than text.
    """
    require_column(table, column, setting)
    value = table.first[column]
    is_text = isinstance(value, str | None)
    if is_mixed or not is_text:
        kind = "several kinds of values" if is_text else type(value).__name__
        raise AssetError(
            f"The column {column!r} of {table.name} holds {kind}, not text.",
            f"Set `{setting}` to one of {listed(table.first)}.",
        )


def require_renamable(table: Table, columns: Mapping[str, str]) -> None:
    """Raise an `AssetError` if a column to rename is missing, or its new name is taken."""
    hint = f"Choose another one in `{table.place}.columns`; the dataset has {listed(table.first)}."
    for old, new in columns.items():
        if old not in table.first:
            raise AssetError(f"The dataset {table.name} has no column {old!r} to rename.", hint)
        if new in table.first:
            taken = f"The column {old!r} of {table.name} cannot be renamed to {new!r}: that name is taken."
            raise AssetError(taken, hint)


def empty_dataset(source: DatasetSection) -> AssetError:
    """Make the error for a dataset without rows."""
    return AssetError(
        f"The dataset {source.path!r} (split {source.split!r}) is empty.",
        "Check its files, or remove the entry from `data.datasets`.",
    )


def num_held_out(num_documents: int, share: float) -> int:
    """Return the number of documents to hold out; `AssetError` if none would remain to train on."""
    num_held_out = max(1, round(share * num_documents))
    if num_held_out >= num_documents:
        raise AssetError(
            f"Of {num_documents} documents, {num_held_out} would be held out and none left to train on.",
            "A .txt file is one document: split it into several, or set `data.eval.test_split_size: 0`.",
        )
    return num_held_out


def require_a_batch(num_samples: int, batch_size: int) -> None:
    """Raise an `AssetError` if the data does not fill one local batch: it would never be trained on."""
    if num_samples < batch_size:
        raise AssetError(
            f"Samples in the training data: {num_samples}; in one local batch: {batch_size}.",
            hint="lower training.per_device_train_batch_size, or bring more data",
        )


def _form(table: Table, columns: tuple[str, ...]) -> Form:
    """Decide by the first row whether columns hold conversations or texts; all must hold the same."""
    kinds: dict[str, tuple[str, str] | None] = {}
    for column in columns:
        value = table.first[column]
        keys = SHAREGPT if column == "conversations" and not is_conversation(value, CHATML) else CHATML
        if not isinstance(value, str) and not is_conversation(value, keys):
            raise _no_conversation(table, column)
        kinds[column] = None if isinstance(value, str) else keys
    if len(set(kinds.values())) > 1:
        said = (f"{name!r} holds {'conversations' if keys else 'text'}" for name, keys in kinds.items())
        hint = "Give all of them texts, or all of them messages."
        if kinds.get("prompt", CHATML) is None:
            away = f"`{table.place}.columns: {{prompt: prompt_text}}`"
            hint = f"Where the answers begin with the prompt, {away} leaves it out."
        raise AssetError(f"The columns of {table.name} do not fit together: {', '.join(said)}.", hint)
    return Form(columns, kinds[columns[0]])


def _lacks(table: Table, columns: str, hint: str = "") -> AssetError:
    """Make the error for a dataset without some columns; by default, it hints at renaming others."""
    rename = f"Rename its columns with `{table.place}.columns`"
    return AssetError(
        f"The dataset {table.name} has no {columns}; it has {listed(table.first)}.",
        hint or f"{rename}, for example `{{instruction: prompt, output: completion}}`.",
    )


def _no_conversation(table: Table, column: str) -> AssetError:
    value = table.first[column]
    renaming = f"`{table.place}.columns: {{{column}: ...}}`"
    hint = f"Rename columns with {renaming}."
    if is_conversation(value, SHAREGPT):
        hint = (
            f"ShareGPT's messages are read from `conversations`: {renaming.replace('...', 'conversations')}."
        )
    return AssetError(
        f"The column {column!r} of {table.name} holds {type(value).__name__} in its first row, and not a "
        "conversation: a list of {role, content}.",
        hint,
    )
