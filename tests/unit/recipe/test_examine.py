"""What the beginning of a data file shows, and that nothing is said that is not certain."""

import pytest

from trahiv_cli.recipe import examine
from trahiv_cli.recipe.examine import look_at
from trahiv_cli.recipe.forms import CHATML, is_conversation


@pytest.fixture
def look(put):
    return lambda name, content: look_at(put({name: content}) / name)


A = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", "\ufeff" + A + "\n" + A, [{"text": "a"}] * 2),
        ("a.json", "\n [" + A + "," + A + "]", [{"text": "a"}] * 2),
        ("a.jsonl", '["a", "b"]', [{"text": "a"}, {"text": "b"}]),
        ("a.jsonl", "5\n", [5]),
        (
            "a.csv",
            '\ufeffn,text\r\n1,"a, b"\r\n2,\r\n',
            [{"n": "1", "text": "a, b"}, {"n": "2", "text": None}],
        ),
        ("a.txt", "a\nb", [{"text": "a\nb"}]),
        ("a.parquet", "", []),
        ("a.jsonl", A + "{", None),
        ("a.json", '{"text": ["a"],}', None),  # which pandas reads
        ("a.jsonl", '{"text": "a", "n": ' + "9" * 5000 + "}\n", None),
        ("a.jsonl", "[" * 100_000, None),
        ("a.json", "[1, 2]", None),
        ("a.csv", "a,b\n1,2,3\n", None),
        ("a.txt", b"\xff", None),
        ("a.parquet", "text", None),
    ],
)
def test_a_small_file_is_known_as_a_whole_and_nothing_of_what_is_not_understood(look, name, content, rows):
    seen = look(name, content)
    assert (seen and (seen.rows, seen.is_whole)) == (None if rows is None else (rows, True))


def test_of_a_long_file_or_an_odd_table_the_beginning_is_known(look, monkeypatch):
    seen = look("a.csv", 'text\n"a"b\n')
    assert (seen.columns, seen.is_whole) == (("text",), False)
    monkeypatch.setattr(examine, "READ_BYTES", 400)
    seen = look("a.jsonl", A * 28 + '{"label": 1}\n' + A * 50)
    assert (seen.rows[0], seen.columns, seen.is_whole) == ({"text": "a"}, ("text", "label"), False)
    assert look("a.jsonl", A * 29 + '{"text": "\u2028"}\n' * 9).columns == ("text",), "only \\n ends a line"
    assert look("a.csv", "text\n" + "a\n" * 1000).columns == ("text",)
    assert look("a.json", "[" + ",".join([A] * 100) + "]") is None
    for offset in range(4):  # cut within a character
        assert look("a.txt", "a" * offset + "\U0001f600\u00e9" * 300).columns == ("text",)


def test_a_message_that_calls_tools_needs_no_content():
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert is_conversation(talk, CHATML) and not is_conversation([{"role": "user"}], CHATML)
