"""First-time stories, from the words that a user types."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(120)


# -- nobody is invited to what can't run ----------------------------------------------------------


def test_who_types_init_with_a_recipe_whose_data_is_wrong_gets_no_line(trahiv, tmp_path, tiny_recipe):
    """The data has another column: said in a second with its place, and nothing was begun."""
    (tmp_path / "chats.jsonl").write_text('{"body": "a document"}\n' * 8)
    recipe = tiny_recipe(tmp_path, data__datasets=[{"path": "chats.jsonl"}])
    result = trahiv("init", recipe)
    assert (result.code, result.out, result.left) == (2, "", ()), result.err
    assert "tiny.yaml:" in result.err
    assert "has no column 'text'; it has body" in result.err
    assert "hint: Set `clm.dataset_text_field`." in result.err
    assert not (tmp_path / "runs").exists()


def test_who_types_init_with_a_tokenizer_that_is_not_there_gets_no_line(trahiv, tmp_path, tiny_recipe):
    """What only a library can tell is told before the line, too: no invitation, no process."""
    (tmp_path / "tokens").mkdir()
    recipe = tiny_recipe(tmp_path, model__tokenizer_name_or_path="./tokens")
    result = trahiv("init", recipe)
    assert (result.code, result.left) == (3, ()), result.err
    assert "error: The tokenizer './tokens' could not be loaded" in result.err
    assert "trahiv join" not in result.out + result.err
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "invitation").exists()
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert "ready" not in {event["event"] for event in told}
    assert told[-1]["event"] == "error"
