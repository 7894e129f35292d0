"""The rows of a data file as written, and files that no reader could read as meant."""

import pytest

from tests.unit.conftest import refused
from trahiv_cli.recipe.files import csv_columns, read_rows


@pytest.fixture
def read(put):
    return lambda name, content, *num_bytes: read_rows(put({name: content}) / name, *num_bytes)


ROW = {"text": "a"}
A = '{"text": "a"}\n'
LONG = '{"text": \n"a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", "\ufeff" + A + '\n{"n": 1}\r\n', [ROW, {"n": 1}]),
        ("a.json", "\n [" + A + "," + A + "]", [ROW, ROW]),
        ("A.NDJSON", LONG + A, [ROW, ROW]),
        ("a.jsonl", '["a", "b"]', [ROW, {"text": "b"}]),
        ("a.jsonl", "5\n", [5]),
        ("a.jsonl", '{"text": "\u2028"}\n', [{"text": "\u2028"}]),  # only \n ends a line
        (
            "a.csv",
            '\ufeffn,text\r\n01,"a, b"\r\n2\r\n',
            [{"n": "01", "text": "a, b"}, {"n": "2", "text": None}],
        ),
        ("a.csv", "\n \nn,text\n\n1,\n\t\n", [{"n": "1", "text": None}]),
        ("a.txt", b"\xff", [{"text": ""}]),
        ("a.jsonl", "", []),
        ("a.jsonl", "[5]", []),
        ("a.jsonl", "[" * 100_000, []),
        ("a.jsonl", A + "9" * 5000, []),
        ("a.csv", 'text\n"a"b\n', []),
        ("a.parquet", "text", []),
    ],
)
def test_only_understood_rows_are_read(read, name, content, rows):
    assert read(name, content) == rows


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.jsonl", A * 100 + '{"text": "a\n' + A, r"Row 101 of .* is no JSON: .*\(line 101, col", "Fix or"),
        ("a.jsonl", A + '{"text": "a",}\n', r"Row 2 of .* is no JSON: .*\(line 2, column 1\d?\)", "Fix or"),
        ("a.jsonl", " null\n", "Row 1 of .* is no JSON object", "Fix or"),
        ("a.csv", "text,n\na,1\nb,2,3\n", "Row 2 of .* has more fields", "in quotes"),
        ("a.csv", "text;n\na;1\n", "divided by ';', not by commas: 'text;n'", "delimiter=';'.* < .*a.csv"),
        ("a.csv", "text\tn\na\t1\n", r"divided by '\\t'", "delimiter="),
        ("a.csv", "text,n,text\na,1,b\n", "two columns of the name text", "Rename"),
        ("a.csv", "text,n\na,1\n".encode("utf-16"), "is UTF-16", "iconv -f UTF-16 -t UTF-8 .*a.csv"),
        ("a.txt", "text".encode("utf-16-be"), "is UTF-16BE", "iconv -f UTF-16BE"),
        ("a.jsonl", A.encode("utf-16-le"), "is UTF-16,", "iconv -f UTF-16 "),
    ],
)
def test_misreadable_file_is_refused(read, name, content, message, hint):
    with refused(message, hint):
        read(name, content)


def test_only_beginning_of_file_is_read(read):
    rows = read("a.jsonl", A * 28 + '{"label": 1}\n' + A * 50, 400)
    assert (rows[0], rows[-1]) == (ROW, {"label": 1})


@pytest.mark.parametrize(
    ("content", "num_bytes"),
    [(A, 0), ("[" + ",".join([A] * 100) + "]", 400), ('{"text":' + "\n" * 500 + '"a"}', 400)],
)
def test_cut_row_is_not_read(read, content, num_bytes):
    assert read("a.jsonl", content, num_bytes) == []


def test_broken_row_at_beginning_is_refused(read):
    with refused("Row 6 of"):
        read("a.jsonl", A * 5 + "{\n" + A * 50, 400)


def test_csv_columns_may_lack_names(put):
    assert csv_columns(put({"a.csv": ",,text\n0,0,a\n"}) / "a.csv") == ["", "", "text"]
