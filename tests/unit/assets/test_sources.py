"""Rows of files of every kind, whole or as a stream, and errors of unreadable files."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets.exceptions import DatasetNotFoundError

from tests.unit.conftest import refused
from trahiv_cli.assets import sources
from trahiv_cli.assets.sources import load_rows, require_text
from trahiv_cli.recipe.builtin import TEXT
from trahiv_cli.recipe.schema import DatasetSection

ROW = '{"text": "fine"}\n'
OTHER = '{"text": "other"}\n'


def opened(path, *, streaming=False, **fields):
    return load_rows(DatasetSection(path=str(path), **fields), "data.datasets.0", streaming=streaming)


def read(path, **options):
    return [row["text"] for row in opened(path, **options).rows]


@pytest.mark.parametrize(
    ("name", "content", "length"),
    [
        ("a.jsonl", '{"text": "one\\ntwo", "length": 7}\n', 7),
        ("a.json", '[{"text": "one\\ntwo", "length": 7}]', 7),
        ("a.csv", 'text,length\n"one\ntwo",7\n', "7"),
    ],
)
def test_every_text_format_is_read(put, name, content, length, streaming):
    put({name: content})
    there = opened(name, streaming=streaming, columns={"text": "prompt"})
    expected = {"prompt": "one\ntwo", "length": length}
    assert there.first == expected
    assert list(there.rows) == [expected]


def test_text_file_is_one_document(put):
    put({f"corpus/{name}.txt": f"{name}\n\ntwo\n" for name in "ba"})
    assert read("corpus/a.txt") == ["a\n\ntwo\n"]
    for path in ("corpus/*.txt", "corpus"):
        assert read(path) == ["a\n\ntwo\n", "b\n\ntwo\n"]


@pytest.mark.parametrize("path", ["corpus", "corpus/data.csv"])
def test_csv_values_are_read_verbatim(put, path, streaming):
    put({"corpus/data.csv": "text,n\nNone,01\nNA,true\n,\n007,1.0\n"})
    rows = [tuple(row.values()) for row in opened(path, streaming=streaming).rows]
    assert rows == [("None", "01"), ("NA", "true"), (None, None), ("007", "1.0")]


def test_csv_column_mixes_numbers_and_words(put, streaming):
    # pandas reads 10,000 rows at once, and would take the first ones for numbers.
    put({"data.csv": "text\n" + "1\n" * 10_000 + "a word\n"})
    assert read("data.csv", streaming=streaming)[-2:] == ["1", "a word"]


def test_csv_files_with_different_columns_are_refused(put):
    put({"corpus/a.csv": "text,n\na,1\n", "corpus/b.csv": "text\nb\n"})
    with refused(r"columns of .*a\.csv and .*b\.csv differ"):
        read("corpus")


@pytest.mark.parametrize("name", ["data [v2]", "q?*", "x::y", "run #1", "a%20b"])
def test_special_characters_in_paths_are_literal(put, name, streaming):
    file = f"{name}/sub/train [clean]::1.JSONL"
    put({file: ROW})
    for path in (file, f"{name}/sub", f"{name}/sub/*.JSONL", name):
        assert read(path, streaming=streaming) == ["fine"]


def test_configurations_may_have_unlike_columns(put):
    entries = "- {config_name: en, data_files: en.csv}\n- {config_name: fr, data_files: fr.csv, sep: ';'}\n"
    readme = f"---\nconfigs:\n{entries}---\n"
    put({"corpus/en.csv": "text\nNA\n", "corpus/fr.csv": "text;n\noui;1\n", "corpus/README.md": readme})
    assert [read("corpus", name=name) for name in ("en", "fr")] == [["NA"], ["oui"]]


def test_files_outside_splits_warn(put, caplog):
    put({"corpus/train.jsonl": ROW, "corpus/extra.jsonl": OTHER})
    assert read("corpus") == ["fine"]
    assert re.search(r"1 files of .*extra\.jsonl", caplog.text)


LABEL = '{"name": "label", "dtype": {"class_label": {"names": ["b", "a"]}}}'
FEATURES = f'[{{"name": "text", "dtype": "string"}}, {LABEL}]'
INFO = (
    '{"text": {"dtype": "string", "_type": "Value"}, "label": {"names": ["b", "a"], "_type": "ClassLabel"}}'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", f"---\ndataset_info:\n  features: {FEATURES}\n---\n"),
        (".huggingface.yaml", f'{{"dataset_info": {{"features": {FEATURES}}}}}'),
        ("dataset_infos.json", f'{{"default": {{"features": {INFO}}}}}'),
    ],
)
def test_folder_metadata_sets_column_types(put, name, content, streaming):
    put({"corpus/train.csv": "text,label\nfine,1\n", f"corpus/{name}": content})
    there = opened("corpus", streaming=streaming)
    assert there.features["label"].names == ["b", "a"]
    assert there.first == {"text": "fine", "label": 1}


@pytest.mark.parametrize(
    ("split", "texts"), [("train", ["a", "b"]), ("train[:50%]", ["a"]), ("test+train[:1]", ["c", "a"])]
)
def test_files_of_other_splits_are_ignored(put, split, texts):
    put(
        {
            "corpus/train.csv": "text\na\nb\n",
            "corpus/test.csv": "text\nc\n",
            "corpus/dev.csv": "text;n\nc;1\n".encode("utf-16"),
            "corpus/classes.csv": "id,name\n0,bad\n",
            "corpus/LICENSE.txt": "no data",
        }
    )
    assert read("corpus", split=split) == texts


def test_broken_file_of_split_is_named(put):
    put({"corpus/dev.csv": "text;n\nc;1\n", "corpus/train.csv": "text\na,b\n"})
    with refused(r"Row 1 of .*train\.csv' has more fields"):
        read("corpus")


def test_text_folder_ignores_license_and_readme(put):
    put({"corpus/a.txt": "a text", "corpus/LICENSE": "no data", "corpus/README.md": "# A dataset"})
    assert read("corpus") == ["a text"]


def test_useless_configuration_name_is_refused(put):
    put({"corpus/a.jsonl": ROW})
    assert read("corpus", name="default") == ["fine"]
    with refused("chooses a configuration", "Remove `name: en`"):
        read("corpus", name="en")


def test_folder_files_are_chosen_by_split(put):
    put({"corpus/train.jsonl": ROW, "corpus/test.jsonl": OTHER})
    assert read("corpus") == ["fine"]
    assert read("corpus", split="test") == read("corpus", data_files="test.jsonl") == ["other"]
    with refused(r"split 'tset'.*'test'"):
        read("corpus", split="tset")


def test_builtin_text_has_source_and_docs():
    texts = read(TEXT)
    assert Path(sources.__file__).read_text(encoding="utf-8") in texts
    assert any(text.startswith("# Running for days") for text in texts)


def test_unknown_builtin_dataset_is_refused():
    with refused("no built-in dataset 'builtin/thariv'", TEXT):
        read("builtin/thariv")


@pytest.mark.parametrize("path", ["corpus", "corpus/*"])
def test_mixed_suffixes_need_configuration(put, path):
    put({"corpus/data.jsonl": ROW, "corpus/data.csv": "text\nof csv\n"})
    with refused(r"several kinds \(\.csv, \.jsonl\)", "its own entry"):
        read(path)
    put({"corpus/README.md": "---\nconfigs:\n- config_name: one\n  data_files: data.csv\n---\n"})
    assert read("corpus") == ["of csv"]


def test_mixed_type_column_is_refused(put, streaming):
    put({"a.jsonl": '{"mixed": "a"}\n{"mixed": 5}\n'})
    there = opened("a.jsonl", streaming=streaming)
    with refused("'mixed' of .* holds several kinds of values, not text"):
        require_text(there, "mixed", "clm.dataset_text_field")


OLD = "(Invalid octet in UTF-8|Expected object)"
"""The message of the JSON reader of `datasets` 4."""


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.csv", "text,n\na,1\nb,2,3\n", r"Row 2 of .*a\.csv' has more fields than its header", "quotes"),
        ("a.csv", b"text\nfine\ncaf\xe9\n", "can't decode byte 0xe9", r"iconv .*a\.csv"),
        ("a.jsonl", 2 * ROW + '{"text": "cut o', r"Row 3 of .*a\.jsonl' is no JSON: .*line 3", "Fix"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', rf"can't decode byte 0xe9|{OLD}", "iconv"),
        ("a.jsonl", "\ufeff\n null\n" + ROW, r"Row 1 of .*a\.jsonl' is no JSON", "Fix"),
        ("a.json", "[null, " + ROW + "]", r"Row 1 of .*a\.json' is no JSON", "Fix"),
        ("a.txt", b"fine\ncaf\xe9\n", "can't decode byte 0xe9", "iconv"),
        ("a.parquet", b"PAR1" + bytes(500) + b"PAR1", r"a\.parquet could not be read: .+", "bring it again"),
        *(
            (name, content, rf"a\.\w+.* (is empty|{OLD})", "Check|Mend")
            for content, *names in (
                ("", "a.txt", "a.csv", "a.json", "a.jsonl", "a.parquet"),
                ("text,n\n", "a.csv"),
                ("[]", "a.json"),
                ("\n\n", "a.jsonl"),
            )
            for name in names
        ),
    ],
)
def test_broken_file_is_refused_with_hint(put, name, content, message, hint, streaming):
    put({name: content})
    with refused(message, hint):
        read(name, streaming=streaming)


def test_broken_file_among_others_is_found(put):
    put(
        {"corpus/a.jsonl": "", "corpus/b.jsonl": ROW, "corpus/c.jsonl": ROW + '{"text', "corpus/d.jsonl": ROW}
    )
    with refused(r"Row 2 of .*c\.jsonl' is no JSON"):
        read("corpus")


def test_stream_fails_at_broken_row(put):
    # pandas reads 10,000 rows at once: the first ones are sound.
    put({"data.csv": "text,n\n" + "a,1\n" * 12_000 + "b,2,3\n"})
    rows = iter(opened("data.csv", streaming=True).rows)
    assert next(rows) == {"text": "a", "n": "1"}
    with refused(r"Row 12,001 of .*data\.csv' has more fields"):
        list(rows)


def test_workers_divide_stream_files(put, monkeypatch):
    put({f"{name}.jsonl": f'{{"text": "{name}1"}}\n{{"text": "{name}2"}}\n' for name in "abc"})
    rows = opened("*.jsonl", streaming=True).rows
    assert rows.num_shards == 3
    seen = []
    for worker in range(2):
        told = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda told=told: told)
        seen += [row["text"] for row in rows]
    assert sorted(seen) == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_unreachable_hub_dataset_is_named(streaming):
    with refused("not be reached for the dataset 'nobody/nothing'", "connection"):
        read("nobody/nothing", streaming=streaming)


def test_dataset_missing_from_hub_is_named(monkeypatch):
    def not_found(**_):
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(sources, "load_dataset", not_found)
    with refused("no dataset 'nobody/nothing' on the hub", "hf auth login"):
        read("nobody/nothing")
