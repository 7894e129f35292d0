"""What the beginning of a data file shows, and that nothing is said that is not certain."""

import pytest

from trahiv_cli.recipe import examine
from trahiv_cli.recipe.forms import CHATML, is_conversation


@pytest.fixture
def look(put):
    return lambda name, content: examine.look_at(put({name: content}) / name)


A = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", "\ufeff" + A + '\n{"n": 1}\r\n', [{"text": "a"}, {"n": 1}]),
        ("a.json", "\n [" + A + "," + A + "]", [{"text": "a"}] * 2),
        ("a.jsonl", '["a", "b"]', [{"text": "a"}, {"text": "b"}]),
        ("a.jsonl", "5\n", [5]),
        ("a.jsonl", '{"text": "\u2028"}\n', [{"text": "\u2028"}]),  # only \n ends a line
        ("a.csv", '\ufeffn,text\r\n1,"a, b"\r\n2,\r\n', [{"n": "1", "text": "a, b"}]),
        ("a.csv", "n,text\n1,\n", [{"n": "1", "text": None}]),
        ("a.txt", b"\xff", [{"text": ""}]),
        *(("a.jsonl", content, []) for content in ("", "[5]", A + "{", "[" * 100_000, A + "9" * 5000)),
        *(("a.csv", content, []) for content in ("a,b\n1,2,3\n", 'text\n"a"b\n')),
        ("a.parquet", "text", []),
    ],
)
def test_the_first_rows_are_known_and_nothing_of_what_is_not_understood(look, name, content, rows):
    assert look(name, content) == rows


def test_of_a_long_file_the_beginning_is_known(look, monkeypatch):
    monkeypatch.setattr(examine, "READ_BYTES", 400)
    rows = look("a.jsonl", A * 28 + '{"label": 1}\n' + A * 50)
    assert (rows[0], rows[-1]) == ({"text": "a"}, {"label": 1})
    assert look("a.json", "[" + ",".join([A] * 100) + "]") == []


def test_a_message_that_calls_tools_needs_no_content():
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert is_conversation(talk, CHATML) and not is_conversation([{"role": "user"}], CHATML)
