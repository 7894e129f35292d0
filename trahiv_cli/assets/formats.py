"""What a row must hold for the tasks that TRL tokenizes itself, `sft` and `dpo`.

Rows stay raw. They are checked here, since TRL looks at the first one only and then fails in the middle of
the data, or trains on something else than was meant, without a word.
"""

from __future__ import annotations

from typing import Any

from datasets import Features, LargeList, List
from transformers import PreTrainedTokenizerBase

from trahiv_cli.assets.sources import Documents, Opened, parallel
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.forms import CHATML, OPTIONAL, SHAREGPT, broken_row, dpo_form, sft_form
from trahiv_cli.recipe.schema import SftSection

ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles that chat templates know; others are the same."""

KEYS = dict(zip(SHAREGPT, CHATML, strict=True))


def trl_rows(
    opened: Opened, sft: SftSection | None, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None
) -> Documents:
    """Keep what TRL's SFTTrainer reads of a dataset, or its DPOTrainer without `sft`.

    `conversations` become `messages` with `user` and `assistant` for ShareGPT's `human` and `gpt` (TRL
    renames the keys only). Beside them those of `OPTIONAL` are kept. A stream is checked while it is read.

    Raises:
        AssetError: see `sft_form` and `dpo_form`; there is no chat template; a row lacks a value.
    """
    form = dpo_form(opened) if sft is None else sft_form(opened, sft)
    if form.keys is not None and tokenizer.chat_template is None:
        problem = "holds conversations, and the tokenizer has no chat template to write them as text"
        hint = "Set `data.chat_template: FILE.jinja`, or name a tokenizer that has one"
        raise AssetError(f"The dataset {opened.name} {problem}.", f"{hint} (`model.tokenizer_name_or_path`).")
    optional = [column for column in OPTIONAL if column in opened.first]
    needed = [*form.columns, *(column for column in optional if column == "chat_template_kwargs")]
    rows, name = opened.rows.select_columns([*form.columns, *optional]), opened.name

    def check(*values: Any) -> bool:
        """Pass every row on, and stop at one that TRL could not read."""
        for column, value in zip(needed, values[:-1], strict=True):
            if problem := form.problem(column, value):
                raise broken_row(name, values[-1], problem)
        return True

    rows = rows.filter(check, with_indices=True, input_columns=needed, **parallel(rows, num_proc))
    if form.columns != ("conversations",):
        return rows
    if form.keys == CHATML:
        return rows.rename_column("conversations", "messages")
    told, features = opened.features.get("conversations"), None
    if isinstance(told, List | LargeList) and isinstance(told.feature, dict):
        # What can be known is said: guessing by the first rows fails where a later one has more.
        inner = {KEYS.get(key, key): feature for key, feature in told.feature.items()}
        kept = {column: opened.features[column] for column in OPTIONAL if column in opened.features}
        features = Features({**kept, "messages": type(told)(inner)})
    only = ["conversations"]
    options = {"input_columns": only, "remove_columns": only, "features": features}
    return rows.map(to_messages, **options, **parallel(rows, num_proc))


def to_messages(conversation: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Turn a conversation of ShareGPT into messages of roles and contents."""
    messages = [{KEYS.get(key, key): value for key, value in message.items()} for message in conversation]
    return {"messages": [{**one, "role": ROLES.get(one["role"], one["role"])} for one in messages]}
