from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError

from trahiv_cli.assets.sources import BUILTIN_STDLIB, STDLIB_BYTES, hub_names, load_documents
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.schema import DatasetSection

STREAMED = pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
TEXTS = ["first document\nof two lines", "second document"]


def write(file: Path, texts: list[str] = TEXTS) -> str:
    """Write `texts` as `file.suffix` wants them; a text file takes the first alone."""
    rows = [{"text": text, "length": len(text)} for text in texts]
    match file.suffix:
        case ".txt":
            file.write_text(texts[0])
        case ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            file.write_text(json.dumps(rows))
        case ".csv":
            Dataset.from_list(rows).to_csv(str(file))
        case ".parquet":
            Dataset.from_list(rows).to_parquet(str(file))
    return str(file)


def read(path: str, *, streaming: bool = False, **fields: str) -> list[str]:
    documents = load_documents(DatasetSection(path=path, **fields), "text", streaming=streaming)
    return [document["text"] for document in documents]


@STREAMED
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_of_each_suffix_is_read(tmp_path: Path, suffix: str, streaming: bool) -> None:
    assert read(write(tmp_path / f"data{suffix}"), streaming=streaming) == TEXTS


def test_a_text_file_is_one_document_with_its_newlines(tmp_path: Path) -> None:
    assert read(write(tmp_path / "data.txt", ["one\n\ntwo\nthree\n"])) == ["one\n\ntwo\nthree\n"]


def test_a_glob_reads_its_matches_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in "ba":
        write(tmp_path / f"{name}.txt", [name])
    assert read(str(tmp_path / "*.txt")) == ["a", "b"]


def test_a_folder_of_text_files_has_one_document_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for text in ("a\nb", "c\nd"):
        write(folder / f"{text[0]}.txt", [text])
    assert read(str(folder)) == ["a\nb", "c\nd"]


def test_a_folder_keeps_the_splits_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", ["learn"])
    write(folder / "test.jsonl", ["measure"])
    assert read(str(folder)) == ["learn"]
    assert read(str(folder), split="test") == ["measure"]


def test_data_files_choose_inside_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "one.jsonl", ["one"])
    write(folder / "two.jsonl", ["two"])
    assert read(str(folder), data_files="two.jsonl") == ["two"]


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    texts = read(BUILTIN_STDLIB)
    assert len(texts) > 50
    assert STDLIB_BYTES / 2 < sum(map(len, texts)) <= STDLIB_BYTES
    assert any("def " in text for text in texts)


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("corpus/dat.jsonl", r"no file or folder '.*dat\.jsonl'", r"Did you mean '.*data\.jsonl'"),
        ("nowhere/data.jsonl", "no file or folder", "nowhere' does not exist either"),
        ("corpus/*.csv", r"No file matches '.*\*\.csv'", "Relative patterns start in"),
        ("corpus/*", r"several kinds \(\.jsonl, \.pdf\)", "its own entry"),
        ("corpus/paper.pdf", r"'paper\.pdf' has a suffix that is not known", r"\.txt \.jsonl"),
        ("empty", "empty' holds no data files", r"\.txt \.jsonl"),
    ],
)
def test_a_path_that_cannot_be_read_says_why(tmp_path: Path, path: str, message: str, hint: str) -> None:
    for folder in ("corpus", "empty"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "corpus" / "data.jsonl")
    (tmp_path / "corpus" / "paper.pdf").touch()
    with pytest.raises(AssetError, match=message) as caught:
        read(str(tmp_path / path))
    assert re.search(hint, caught.value.hint)


@STREAMED
def test_a_missing_column_is_answered_with_those_there_are(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(AssetError, match="no column 'txt'; it has text, length") as caught:
        load_documents(DatasetSection(path=path), "txt", streaming=streaming)
    assert caught.value.hint == "Set `clm.dataset_text_field` to 'text'."


@STREAMED
def test_a_column_that_is_not_text_is_refused(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(AssetError, match="'length' of .* holds int, not text"):
        load_documents(DatasetSection(path=path), "length", streaming=streaming)


@STREAMED
def test_an_empty_file_is_an_empty_dataset(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "data.jsonl").touch()
    with pytest.raises(AssetError, match=r"data\.jsonl' \(split 'train'\) is empty"):
        read(str(tmp_path / "data.jsonl"), streaming=streaming)


@STREAMED
def test_a_damaged_file_names_itself_and_the_reason(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n{"text": oops')
    with pytest.raises(AssetError, match=r"data\.jsonl.* could not be read: JSON parse error"):
        read(str(tmp_path / "data.jsonl"), streaming=streaming)


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(AssetError, match=r"split 'tset'.*\['train'\]"):
        read(path, split="tset")


@STREAMED
def test_a_hub_that_cannot_be_reached_says_what_was_wanted(streaming: bool) -> None:
    with pytest.raises(AssetError, match="could not be reached for the dataset 'nobody/nothing'") as caught:
        read("nobody/nothing", streaming=streaming)
    assert "connection" in caught.value.hint


def test_a_dataset_that_the_hub_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(**_: object) -> None:
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr("trahiv_cli.assets.sources.load_dataset", not_found)
    with pytest.raises(AssetError, match="no dataset 'nobody/nothing' on the hub") as caught:
        read("nobody/nothing")
    assert "hf auth login" in caught.value.hint


def test_only_names_that_others_can_find_are_named(tmp_path: Path) -> None:
    paths = ["owner/name", "squad", BUILTIN_STDLIB, str(tmp_path), "texts/data.jsonl", "texts/*"]
    assert hub_names([DatasetSection(path=path) for path in paths]) == ["owner/name", "squad"]
