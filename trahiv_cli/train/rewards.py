"""The rewards of `task: grpo`: functions that score completions.

TRL calls a reward with lists of equal length: `prompts`, `completions`, `completion_ids`, and each other
column of the dataset. It returns a number for each completion, or None for one that it can't judge.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from trahiv_cli.errors import AssetError, SetupError
from trahiv_cli.recipe.builtin import how_to_install
from trahiv_cli.recipe.rows import texts_of
from trahiv_cli.recipe.task_sections import TRL_REWARDS, GrpoSection, RewardFunction

Reward: TypeAlias = Callable[..., list[float | None]]

NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)")
"""A number with or without commas between thousands; a sign after a digit is an operator."""


def build_rewards(grpo: GrpoSection) -> list[Reward]:
    """Return the functions of a recipe's rewards, in its order.

    The file of a user's own reward is run; its content has been compared with the swarm's.

    Raises:
        SetupError: a package that the reward needs is not installed.
        AssetError: the user's own file can't be run.
    """
    rewards: list[Reward] = []
    for one in grpo.rewards:
        reward = build_reward(one)
        same = [known for known in rewards if known.__name__.partition(" ")[0] == reward.__name__]
        # TRL keeps figures by name.
        rewards.append(Named(f"{reward.__name__} {len(same) + 1}", reward) if same else reward)
    return rewards


def build_reward(reward: RewardFunction) -> Reward:
    """Return one reward as a function with its name; see `build_rewards`."""
    if reward.is_own:
        return own_function(reward.name)
    if reward.name in TRL_REWARDS:
        return function_of_trl(reward)
    judge = JUDGES[reward.name](reward)

    def score(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        answers = columns.get(reward.column, [None] * len(completions))
        rows = zip(map(text_of, completions), completion_ids, answers, strict=True)
        return [float(judge(text, ids, answer)) for text, ids, answer in rows]

    return Named(reward.name, score)


class Named:
    """A reward under a name, by which TRL logs it."""

    def __init__(self, name: str, reward: Reward) -> None:
        self.__name__ = name
        self._reward = reward

    def __call__(self, *args: Any, **keywords: Any) -> list[float | None]:
        """Score completions."""
        return self._reward(*args, **keywords)


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion, which in a conversation is a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(text for message in completion for text in texts_of(message))


def last_number(text: object) -> float | None:
    """Return the last number in a text, with commas between thousands or not; None if it has none."""
    numbers = NUMBER.findall(str(text))
    return float(numbers[-1].replace(",", "")) if numbers else None


# -- trahiv's own ---------------------------------------------------------------------------------

Judge: TypeAlias = Callable[[str, list[int], Any], bool]
"""Takes a completion's text and tokens, and the right answer, if the reward reads one."""


def exact_match(_: RewardFunction) -> Judge:
    """Judge whether a completion is the answer, apart from white space around it."""
    return lambda text, _, answer: text.strip() == str(answer).strip()


def number(_: RewardFunction) -> Judge:
    """Judge whether the last number of a completion is the last one of the answer."""
    return lambda text, _, answer: (found := last_number(text)) is not None and found == last_number(answer)


def pattern(reward: RewardFunction) -> Judge:
    """Judge whether the pattern is in a completion; one that takes longer than a second is not found."""
    import regex

    compiled = regex.compile(reward.pattern or "")

    def judge(text: str, _: list[int], __: Any) -> bool:
        try:
            return compiled.search(text, timeout=1.0) is not None
        except TimeoutError:
            return False

    return judge


def fits_schema(reward: RewardFunction) -> Judge:
    """Judge whether a completion, or its only block of code, is JSON that fits the schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(reward.json_schema or {})
    except SchemaError as failure:
        raise AssetError(
            f"A reward's `json_schema` is not valid: {failure.message}.", "Correct it in `grpo.rewards`."
        ) from failure
    validator = Draft202012Validator(reward.json_schema or {})

    def judge(text: str, _: list[int], __: Any) -> bool:
        block = re.fullmatch(r"\s*```(?:json)?\n(.*)```\s*", text, re.DOTALL)
        try:
            return bool(validator.is_valid(json.loads(block[1] if block else text)))
        except (ValueError, RecursionError):
            return False

    return judge


def length(reward: RewardFunction) -> Judge:
    """Judge whether a completion has the wanted number of tokens."""
    most = reward.max_tokens or 0
    return lambda _, ids, __: reward.min_tokens <= len(ids) <= most


JUDGES: dict[str, Callable[[RewardFunction], Judge]] = {
    "exact_match": exact_match,
    "number": number,
    "regex": pattern,
    "json_schema": fits_schema,
    "length": length,
}


# -- others' --------------------------------------------------------------------------------------


def function_of_trl(reward: RewardFunction) -> Reward:
    """Return a reward of `trl.rewards`; `get_...` makes one with the reward's options."""
    from trl import rewards

    if reward.name.endswith("accuracy_reward") and importlib.util.find_spec("math_verify") is None:
        raise SetupError(
            f"The reward {reward.name!r} needs the package math-verify.", how_to_install("math-verify")
        )
    function: Any = getattr(rewards, reward.name)
    if not reward.name.startswith("get_"):
        return function
    try:
        return Named(reward.name, function(**reward.options))
    except TypeError as failure:
        raise AssetError(
            f"The reward {reward.name!r} does not take these options: {failure}.",
            f"Correct `options`; TRL's documentation of `{reward.name}` has them.",
        ) from failure


def own_function(name: str) -> Reward:
    """Run a user's file, and return the function in it that `name` (`FILE.py:FUNCTION`) means."""
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, function)
    except Exception as failure:  # noqa: BLE001 - whatever the user's own code raises
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise AssetError(f"{file!r} could not be run: {reason}", "Correct it.") from failure
