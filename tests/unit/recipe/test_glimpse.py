"""What the ends of a data file show, and that nothing is called broken that is not."""

import json

import pytest

from trahiv_cli.recipe import glimpse
from trahiv_cli.recipe.forms import is_conversation
from trahiv_cli.recipe.glimpse import look_at


@pytest.fixture
def look(tmp_path):
    def look(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return look_at(file)

    return look


@pytest.fixture
def long(monkeypatch):
    """Take files of a few lines for long ones, of which only the ends are read."""
    monkeypatch.setattr(glimpse, "WHOLE_BYTES", 400)
    monkeypatch.setattr(glimpse, "END_BYTES", 100)
    monkeypatch.setattr(glimpse, "TYPED_BYTES", 1000)


A = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", A + "\n" + A, [{"text": "a"}] * 2),
        ("a.jsonl", "\ufeff" + A, [{"text": "a"}]),
        ("a.json", "\n [" + A + "," + A + "]", [{"text": "a"}] * 2),
        ("a.jsonl", '["a", "b"]', [{"text": "a"}, {"text": "b"}]),
        ("a.jsonl", json.dumps({"text": "a"}, indent=2) * 2, [{"text": "a"}] * 2),
        ("a.csv", 'n,text\r\n1,"a, b"\r\n2,\r\n', [{"n": "1", "text": "a, b"}, {"n": "2", "text": None}]),
        ("a.csv", "\ufefftext\na\n", [{"text": "a"}]),
        ("a.txt", "a\nb", [{"text": "a\nb"}]),
        ("a.jsonl", "", []),
    ],
)
def test_a_small_file_is_known_as_a_whole(look, name, content, rows):
    seen = look(name, content)
    assert (seen.rows, seen.is_whole, seen.knows_columns, seen.damage) == (rows, True, True, None)


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", A + "{", "line 2"),
        ("a.jsonl", "{'text': 'a'}\n" + A, "line 1"),
        ("a.json", "[" + A, "in the middle of a value"),
        ("a.jsonl", "5\n", "line 1: a row must be"),
        ("a.csv", "a,b\n1,2,3\n", "line 2: 3 fields"),
        ("a.csv", 'a,b\n"1,2\n', "never closed"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.parquet", "text", "no Parquet file"),
    ],
)
def test_what_makes_a_file_unreadable_is_found(look, name, content, where):
    damage = look(name, content).damage
    assert where in str(damage)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"text": ["a"],}'),  # pandas reads it
        ("a.jsonl", '{"text": "a", "n": ' + "9" * 5000 + "}\n"),
        ("a.csv", 'text\n"a"b\n'),
        ("a.json", "[1, 2]"),
    ],
)
def test_what_is_not_understood_is_not_called_broken(look, name, content):
    seen = look(name, content)
    assert (seen.damage, seen.is_whole) == (None, False)


def test_of_a_long_file_the_first_rows_are_known_and_the_last_is_looked_at(look, long):
    seen = look("a.jsonl", A * 100)
    assert (seen.rows[0], seen.columns, seen.is_whole, seen.damage) == ({"text": "a"}, ("text",), False, None)
    assert str(look("a.jsonl", A * 100 + '{"text": ').damage).endswith("the middle of the line.")
    assert "line 2: not JSON" in str(look("a.jsonl", A + "{text: 5}\n" + A * 100).damage)
    assert look("a.jsonl", json.dumps({"text": "a"}, indent=2) * 100).damage is None
    assert look("a.json", "[" + ",".join([A] * 100) + "]").damage is None
    assert look("a.jsonl", '{"text": "a\u2028b\u0085c"}\n' * 100).damage is None, "only \\n ends a line"


def test_a_long_text_that_is_cut_within_a_character_is_text(look, long):
    for offset in range(4):
        assert look("a.txt", "a" * offset + "😀é" * 300).damage is None


def test_a_message_that_calls_tools_needs_no_content():
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert is_conversation(talk, ("role", "content"))
    assert not is_conversation([{"role": "user"}], ("role", "content"))


def test_a_column_that_a_later_row_may_bring_is_not_denied(look, long):
    assert not look("a.jsonl", A * 100).may_have("label")
    assert look("a.jsonl", A * 50 + '{"label": 1}\n' + A * 50).may_have("label")
    assert look("a.jsonl", A * 50 + '{"\\u00e9": 1}\n' + A * 50).may_have("é")
    assert not look("a.csv", "text\n" + "a\n" * 1000).may_have("label")
