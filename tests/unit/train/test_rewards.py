"""The rewards of `task: grpo`: each with right and wrong completions, and functions in files of the user."""

import importlib.util
import time
from inspect import iscoroutinefunction

import pytest

from tests.unit.conftest import refused
from trahiv_cli.errors import SetupError
from trahiv_cli.recipe.task_sections import GrpoSection, RewardFunction
from trahiv_cli.train.rewards import build_reward, build_rewards

SCHEMA = {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer"}}}


def scores(completions, *, answers=None, **fields):
    """Score texts, each as long in tokens as it has letters."""
    ids = [[0] * len(text) for text in completions]
    columns = {} if answers is None else {fields.get("column", "answer"): answers}
    return build_reward(RewardFunction(**fields))(
        prompts=["?"] * len(ids), completions=completions, completion_ids=ids, trainer_state=None, **columns
    )


@pytest.mark.parametrize(
    ("fields", "completions", "answers", "wanted"),
    [
        ({"name": "exact_match"}, [" 7\n", "7.", "8"], ["7", "7", "7"], [1, 0, 0]),
        ({"name": "exact_match", "column": "sum"}, ["7"], [7], [1]),
        ({"name": "number"}, ["So 3 + 4 = 7", "7 - 1", "none", ""], ["#### 7"] * 4, [1, 0, 0, 0]),
        ({"name": "number"}, ["1,234.50", "-2", ".5", "3,4"], ["1234.5", "2", "0.5", "4"], [1, 0, 1, 1]),
        ({"name": "number"}, ["5-2", "5 - 2", "12,345,678"], ["2", "2", "12345678"], [1, 1, 1]),
        ({"name": "regex", "pattern": "^[0-9]+$"}, ["12", "1 2"], None, [1, 0]),
        (
            {"name": "length", "min_tokens": 2, "max_tokens": 3},
            ["a", "ab", "abc", "abcd"],
            None,
            [0, 1, 1, 0],
        ),
        (
            {"name": "json_schema", "json_schema": SCHEMA},
            ['{"sum": 7}', '```json\n{"sum": 7}\n```', '{"sum": "7"}', "seven", "[" * 100_000],
            None,
            [1, 1, 0, 0, 0],
        ),
    ],
)
def test_reward_tells_right_completions(fields, completions, answers, wanted):
    assert scores(completions, answers=answers, **fields) == wanted
    assert build_reward(RewardFunction(**fields)).__name__ == fields["name"]


def test_conversations_are_read_as_text():
    reward = build_reward(RewardFunction(name="number"))
    answer = [{"role": "assistant", "content": "It is 7."}]
    assert reward(completions=[answer], completion_ids=[[1]], answer=["7"]) == [1.0]


def test_endless_pattern_finds_nothing():
    before = time.monotonic()
    assert scores(["a" * 60 + "b"], name="regex", pattern="(a|aa)+$") == [0.0]
    assert time.monotonic() - before < 30


def test_rewards_of_trl_take_options():
    overlong = {"max_completion_len": 4, "soft_punish_cache": 2}
    fields = {"name": "get_soft_overlong_punishment", "options": overlong}
    assert scores(["ab", "abcdef"], **fields) == [0.0, -1.0]
    with refused("does not take these options"):
        build_reward(RewardFunction(name="get_soft_overlong_punishment", options={"words": 3}))


def test_rewards_of_one_kind_keep_apart(put):
    put({"mine.py": "async def score(**_): pass"})
    patterns = [{"name": "regex", "pattern": sign} for sign in "ab"]
    rewards = build_rewards(GrpoSection(rewards=["number", *patterns, "mine.py:score"]))
    assert [one.__name__ for one in rewards] == ["number", "regex", "regex 2", "score"]
    assert [one(completions=["a"], completion_ids=[[1]]) for one in rewards[1:3]] == [[1.0], [0.0]]
    assert iscoroutinefunction(rewards[3]), "TRL awaits it"


def test_missing_package_of_reward_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "math_verify" else found(name, *more)
    )
    with refused("needs the package math-verify", error=SetupError):
        build_reward(RewardFunction(name="accuracy_reward"))


def test_own_function_scores(put):
    put({"rewards.py": "def double(completions, **_):\n    return [2.0 * len(it) for it in completions]\n"})
    assert scores(["ab", ""], name="rewards.py:double") == [4.0, 0.0]


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemError('no')", "def another(): pass"])
def test_broken_own_file_is_refused(put, text):
    put({"rewards.py": text})
    with refused("could not be run"):
        build_reward(RewardFunction(name="rewards.py:double"))


def test_invalid_schema_is_refused():
    with refused("`json_schema` is not valid"):
        build_reward(RewardFunction(name="json_schema", json_schema={"type": "number or so"}))
