"""Rows of files of every kind, whole or as a stream, and errors of unreadable files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError

from tests.unit.assets.conftest import STREAMED
from trahiv_cli.assets import sources
from trahiv_cli.assets.sources import load_rows, require_text
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.builtin import TEXT
from trahiv_cli.recipe.schema import DatasetSection

TEXTS = ["first document\nof two lines", "second document"]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def write(file, texts=TEXTS):
    """Write `texts` in the format of `file.suffix`; a text file takes only the first."""
    rows = Dataset.from_list([{"text": text, "length": len(text)} for text in texts])
    writers = {".jsonl": rows.to_json, ".csv": rows.to_csv, ".parquet": rows.to_parquet}
    if file.suffix in writers:
        writers[file.suffix](str(file))
    else:
        file.write_text(texts[0] if file.suffix == ".txt" else json.dumps(rows.to_list()))
    return str(file)


def opened(path, *, streaming=False, **fields):
    return load_rows(DatasetSection(path=str(path), **fields), "data.datasets.0", streaming=streaming)


def read(path, *, streaming=False, **fields):
    return [row["text"] for row in opened(path, streaming=streaming, **fields).rows]


@STREAMED
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_suffix_is_read(tmp_path, suffix, streaming):
    path = write(tmp_path / f"data{suffix}")
    assert read(path, streaming=streaming) == TEXTS
    there = opened(path, streaming=streaming, columns={"text": "prompt"})
    length = str(len(TEXTS[0])) if suffix == ".csv" else len(TEXTS[0])
    assert there.first == {"prompt": TEXTS[0], "length": length}
    assert [row["prompt"] for row in there.rows] == TEXTS


def test_text_file_is_one_document(folder):
    for name in "ba":
        write(folder / f"{name}.txt", [f"{name}\n\ntwo\n"])
    assert read(folder / "a.txt") == ["a\n\ntwo\n"]
    for path in (folder / "*.txt", folder):
        assert read(path) == ["a\n\ntwo\n", "b\n\ntwo\n"]


@STREAMED
def test_csv_values_are_read_verbatim(folder, streaming):
    (folder / "data.csv").write_text("text,n\nNone,01\nNA,true\n,\n007,1.0\n")
    for path in (folder, folder / "data.csv"):
        rows = list(opened(path, streaming=streaming).rows)
        assert [row["text"] for row in rows] == ["None", "NA", None, "007"]
        assert [row["n"] for row in rows] == ["01", "true", None, "1.0"]


@STREAMED
def test_csv_column_mixes_numbers_and_words(tmp_path, streaming):
    # pandas reads 10,000 rows at once, and would take the first ones for numbers.
    (tmp_path / "data.csv").write_text("text\n" + "1\n" * 10_000 + "a word\n")
    assert read(tmp_path / "data.csv", streaming=streaming)[-2:] == ["1", "a word"]


def test_csv_files_with_different_columns_are_refused(folder):
    (folder / "a.csv").write_text("text,n\na,1\n")
    (folder / "b.csv").write_text("text\nb\n")
    with pytest.raises(AssetError, match=r"columns of .*a\.csv and .*b\.csv differ"):
        read(folder)


@STREAMED
@pytest.mark.parametrize("name", ["data [v2]", "q?*", "x::y", "run #1", "a%20b"])
def test_special_characters_in_paths_are_literal(tmp_path, name, streaming):
    folder = tmp_path / name / "sub"
    folder.mkdir(parents=True)
    file = write(folder / "train [clean]::1.JSONL")
    for path in (file, folder, folder / "*.JSONL", tmp_path / name):
        assert read(path, streaming=streaming) == TEXTS


def test_configurations_may_have_unlike_columns(folder):
    (folder / "en.csv").write_text("text\nNA\n")
    (folder / "fr.csv").write_text("text;n\noui;1\n")
    entries = "- {config_name: en, data_files: en.csv}\n- {config_name: fr, data_files: fr.csv, sep: ';'}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    assert (read(folder, name="en"), read(folder, name="fr")) == (["NA"], ["oui"])


def test_files_outside_splits_warn(folder, caplog):
    write(folder / "train.jsonl", ["learn"])
    write(folder / "extra.jsonl", ["more"])
    assert read(folder) == ["learn"]
    assert "1 files of" in caplog.text and "extra.jsonl" in caplog.text


FEATURES = [
    {"name": "text", "dtype": "string"},
    {"name": "label", "dtype": {"class_label": {"names": ["b", "a"]}}},
]
INFO = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": ["b", "a"], "_type": "ClassLabel"}}


@STREAMED
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", f"---\ndataset_info:\n  features: {json.dumps(FEATURES)}\n---\n"),
        (".huggingface.yaml", json.dumps({"dataset_info": {"features": FEATURES}})),
        ("dataset_infos.json", json.dumps({"default": {"features": INFO}})),
    ],
)
def test_folder_metadata_sets_column_types(folder, name, content, streaming):
    (folder / "train.csv").write_text("text,label\nfine,1\n")
    (folder / name).write_text(content)
    there = opened(folder, streaming=streaming)
    assert there.features["label"].names == ["b", "a"] and there.first == {"text": "fine", "label": 1}


@pytest.mark.parametrize(
    ("split", "texts"), [("train", ["a", "b"]), ("train[:50%]", ["a"]), ("test+train[:1]", ["c", "a"])]
)
def test_files_of_other_splits_are_ignored(folder, split, texts):
    (folder / "train.csv").write_text("text\na\nb\n")
    (folder / "test.csv").write_text("text\nc\n")
    (folder / "dev.csv").write_bytes("text;n\nc;1\n".encode("utf-16"))
    (folder / "classes.csv").write_text("id,name\n0,bad\n")
    (folder / "LICENSE.txt").write_text("no data")
    assert read(folder, split=split) == texts


def test_broken_file_of_split_is_named(folder):
    (folder / "dev.csv").write_text("text;n\nc;1\n")
    (folder / "train.csv").write_text("text\na,b\n")
    with pytest.raises(AssetError, match=r"Row 1 of .*train\.csv"):
        read(folder)


def test_text_folder_ignores_license_and_readme(folder):
    write(folder / "a.txt", ["a text"])
    (folder / "LICENSE").write_text("no data")
    (folder / "README.md").write_text("# A dataset")
    assert read(folder) == ["a text"]


def test_useless_configuration_name_is_refused(folder):
    write(folder / "a.jsonl")
    with pytest.raises(AssetError, match="chooses a configuration") as caught:
        read(folder, name="en")
    assert "Remove `name: en`" in caught.value.hint
    assert read(folder, name="default") == TEXTS


def test_folder_files_are_chosen_by_split(folder):
    write(folder / "train.jsonl", ["learn"])
    write(folder / "test.jsonl", ["measure"])
    assert read(folder) == ["learn"]
    assert read(folder, split="test") == ["measure"]
    assert read(folder, data_files="test.jsonl") == ["measure"]
    with pytest.raises(AssetError, match=r"split 'tset'.*'test'"):
        read(folder, split="tset")


def test_builtin_text_has_source_and_docs():
    texts = read(TEXT)
    assert Path(sources.__file__).read_text(encoding="utf-8") in texts
    assert any(text.startswith("# Running for days") for text in texts)
    with pytest.raises(AssetError, match="no built-in dataset 'builtin/thariv'") as caught:
        read("builtin/thariv")
    assert TEXT in caught.value.hint


def test_folder_with_mixed_suffixes_is_refused(folder):
    write(folder / "data.jsonl", ["of json"])
    write(folder / "data.csv", ["of csv"])
    for path in (folder, folder / "*"):
        with pytest.raises(AssetError, match=r"several kinds \(\.csv, \.jsonl\)") as caught:
            read(path)
        assert "its own entry" in caught.value.hint
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: one\n  data_files: data.csv\n---\n")
    assert read(folder) == ["of csv"]


@STREAMED
def test_mixed_type_column_is_refused(write_rows, streaming):
    there = opened(write_rows([{"mixed": "a"}, {"mixed": 5}]).path, streaming=streaming)
    with pytest.raises(AssetError, match="'mixed' of .* holds several kinds of values, not text"):
        require_text(there, "mixed", "clm.dataset_text_field")


ROW = '{"text": "fine"}\n'
PARQUET = b"PAR1" + bytes(500) + b"PAR1"
OLD = "(Invalid octet in UTF-8|Expected object)"
"""The message of the JSON reader of `datasets` 4."""


@STREAMED
@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        (
            "a.csv",
            "text,n\na,1\nb,2,3\n",
            r"Row 2 of .*a\.csv' has more fields than its header",
            "quotes",
        ),
        ("a.csv", "text,n\na,1,9\nb,2,9\n", r"Row 1 of .*a\.csv' has more fields than its header", "quotes"),
        ("a.csv", b"text\nfine\ncaf\xe9\n", "can't decode byte 0xe9", r"iconv .*a\.csv"),
        ("a.jsonl", 2 * ROW + '{"text": "cut o', r"Row 3 of .*a\.jsonl' is no JSON: .*line 3", "Fix"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', rf"can't decode byte 0xe9|{OLD}", "iconv"),
        *(
            ("a.jsonl", row + ROW, r"Row 1 of .*a\.jsonl' is no JSON", "Fix")
            for row in ("null\n", "\ufeff\n null\n")
        ),
        ("a.json", "[null, " + ROW + "]", r"Row 1 of .*a\.json' is no JSON", "Fix"),
        ("a.txt", b"fine\ncaf\xe9\n", "can't decode byte 0xe9", "iconv"),
        ("a.parquet", PARQUET, r"a\.parquet could not be read: .+", "bring it again"),
        *(
            (name, content, rf"a\.\w+.* (is empty|{OLD})", "Check|Mend")
            for name in ("a.txt", "a.csv", "a.json", "a.jsonl", "a.parquet")
            for content in ("", {"a.csv": "text,n\n", "a.json": "[]", "a.jsonl": "\n\n"}.get(name))
            if content is not None
        ),
    ],
)
def test_broken_file_is_refused_with_hint(tmp_path, name, content, message, hint, streaming):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AssetError, match=message) as caught:
        read(file, streaming=streaming)
    assert re.search(hint, caught.value.hint)


def test_broken_file_among_others_is_found(folder):
    for name, content in {"a": "", "b": ROW, "c": ROW + '{"text', "d": ROW}.items():
        (folder / f"{name}.jsonl").write_text(content)
    with pytest.raises(AssetError, match=r"Row 2 of .*c\.jsonl' is no JSON"):
        read(folder)


def test_stream_fails_at_broken_row(tmp_path):
    # pandas reads 10,000 rows at once: the first ones are sound.
    file = tmp_path / "data.csv"
    file.write_text("text,n\n" + "a,1\n" * 12_000 + "b,2,3\n")
    rows = iter(opened(file, streaming=True).rows)
    assert next(rows) == {"text": "a", "n": "1"}
    with pytest.raises(AssetError, match=r"Row 12,001 of .*data\.csv' has more fields"):
        list(rows)


def test_workers_divide_stream_files(tmp_path, monkeypatch):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [f"{name}1", f"{name}2"])
    rows = opened(tmp_path / "*.jsonl", streaming=True).rows
    assert rows.num_shards == 3
    seen = []
    for worker in range(2):
        told = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda told=told: told)
        seen.append({row["text"] for row in rows})
    assert not seen[0] & seen[1]
    assert sorted(seen[0] | seen[1]) == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_missing_hub_dataset_is_named(monkeypatch):
    for streaming in (False, True):
        with pytest.raises(AssetError, match="not be reached for the dataset 'nobody/nothing'") as caught:
            read("nobody/nothing", streaming=streaming)
        assert "connection" in caught.value.hint

    def not_found(**_):
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(sources, "load_dataset", not_found)
    with pytest.raises(AssetError, match="no dataset 'nobody/nothing' on the hub") as caught:
        read("nobody/nothing")
    assert "hf auth login" in caught.value.hint
