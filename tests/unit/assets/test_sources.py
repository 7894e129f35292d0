import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError

from tests.unit.assets.conftest import STREAMED
from trahiv_cli.assets import sources
from trahiv_cli.assets.sources import hub_names, load_rows, require_text
from trahiv_cli.errors import AssetError
from trahiv_cli.recipe.builtin import TEXT
from trahiv_cli.recipe.schema import DatasetSection

TEXTS = ["first document\nof two lines", "second document"]


def write(file, texts=TEXTS):
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


def opened(path, *, streaming=False, **fields):
    return load_rows(DatasetSection(path=path, **fields), "data.datasets.0", streaming=streaming)


def read(path, *, streaming=False, **fields):
    return [row["text"] for row in opened(path, streaming=streaming, **fields).rows]


@STREAMED
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_of_each_suffix_is_read(tmp_path, suffix, streaming):
    assert read(write(tmp_path / f"data{suffix}"), streaming=streaming) == TEXTS


def test_a_text_file_is_one_document_with_its_newlines_and_a_glob_reads_them_by_name(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ba":
        write(folder / f"{name}.txt", [f"{name}\n\ntwo\n"])
    assert read(str(folder / "a.txt")) == ["a\n\ntwo\n"]
    for path in (folder / "*.txt", folder):
        assert read(str(path)) == ["a\n\ntwo\n", "b\n\ntwo\n"]


@STREAMED
def test_a_csv_may_say_none(tmp_path, streaming):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "data.csv").write_text("text,n\nNone,1\nNA,2\n,3\n")
    for path in (folder, folder / "data.csv"):
        assert read(str(path), streaming=streaming) == ["None", "NA", None]


def test_a_folder_keeps_the_splits_of_its_files_or_data_files_choose_inside_it(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "train.jsonl", ["learn"])
    write(folder / "test.jsonl", ["measure"])
    assert read(str(folder)) == ["learn"]
    assert read(str(folder), split="test") == ["measure"]
    assert read(str(folder), data_files="test.jsonl") == ["measure"]


def test_the_built_in_text_is_our_own_source_and_documentation():
    texts = read(TEXT)
    assert Path(sources.__file__).read_text(encoding="utf-8") in texts
    assert any(text.startswith("# Running for days") for text in texts)


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("corpus/dat.jsonl", r"no file or folder '.*dat\.jsonl'", r"Did you mean '.*data\.jsonl'"),
        ("mixed", r"several kinds \(\.csv, \.jsonl\)", "its own entry"),
        ("mixed/*", r"several kinds \(\.csv, \.jsonl\)", "its own entry"),
        ("corpus/paper.pdf", r"'paper\.pdf' has a suffix that is not known", r"\.txt \.jsonl"),
        ("empty", "empty' holds no data files", r"\.txt \.jsonl"),
    ],
)
def test_a_path_that_cannot_be_read_says_why(tmp_path, path, message, hint):
    for folder in ("corpus", "empty", "mixed"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "corpus" / "data.jsonl")
    write(tmp_path / "mixed" / "data.jsonl")
    write(tmp_path / "mixed" / "data.csv")
    (tmp_path / "corpus" / "paper.pdf").touch()
    with pytest.raises(AssetError, match=message) as caught:
        read(str(tmp_path / path))
    assert re.search(hint, caught.value.hint)


def test_there_is_no_other_built_in_text():
    with pytest.raises(AssetError, match="no built-in dataset 'builtin/thariv'") as caught:
        read("builtin/thariv")
    assert TEXT in caught.value.hint


# -- columns --------------------------------------------------------------------------------------


@STREAMED
@pytest.mark.parametrize(
    ("column", "message", "hint"),
    [
        ("txt", "no column 'txt'; it has text, length, mixed", "Set `clm.dataset_text_field` to 'text'."),
        ("length", "'length' of .* holds int, not text", ""),
        ("mixed", "'mixed' of .* holds several kinds of values, not text", ""),
    ],
)
def test_a_column_that_is_missing_or_holds_no_text_is_refused(tmp_path, column, message, hint, streaming):
    rows = [{"text": "a", "length": 1, "mixed": "a"}, {"text": "b", "length": 1, "mixed": 5}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    there = opened(str(tmp_path / "data.jsonl"), streaming=streaming)
    with pytest.raises(AssetError, match=message) as caught:
        require_text(there, column, "clm.dataset_text_field")
    assert hint in caught.value.hint


@STREAMED
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_columns_are_renamed(tmp_path, suffix, streaming):
    path = write(tmp_path / f"data{suffix}")
    there = opened(path, streaming=streaming, columns={"text": "prompt"})
    assert there.first == {"prompt": TEXTS[0], "length": len(TEXTS[0])}
    assert [row["prompt"] for row in there.rows] == TEXTS


@STREAMED
@pytest.mark.parametrize(
    ("columns", "message", "hint"),
    [
        ({"txt": "prompt"}, "no column 'txt' to rename; it has text, length", "did you mean 'text'"),
        ({"text": "length"}, "'text' of .* cannot be renamed to 'length': that name is taken", "another one"),
    ],
)
def test_columns_that_cannot_be_renamed_say_why(tmp_path, columns, message, hint, streaming):
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(AssetError, match=message) as caught:
        opened(path, streaming=streaming, columns=columns)
    assert hint in caught.value.hint and "`data.datasets.0.columns`" in caught.value.hint


# -- broken files ---------------------------------------------------------------------------------

ROW = '{"text": "fine"}\n'
PARQUET = b"PAR1" + bytes(500) + b"PAR1"


@STREAMED
@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.csv", "text,n\na,1\nb,2,3\nc,4\n", r"a\.csv could .*Expected 2 fields in line 3, saw 3", "Mend"),
        ("a.csv", "text,n\na,1,9\nb,2,9\n", r"row of .*a\.csv has more fields than its header", "quotes"),
        ("a.csv", 'text,n\na,1\n"b,2\nc,4\n', "EOF inside string starting at row 2", "Mend"),
        ("a.csv", b"text\nfine\ncaf\xe9\n", "can't decode byte 0xe9", r"iconv .*a\.csv"),
        ("a.jsonl", 2 * ROW + '{"text": "cut o', r"a\.jsonl could .*closing quotation .* in row 2", "Mend"),
        ("a.jsonl", ROW + '{"text": oops}\n' + ROW, r"Invalid value\. in row 1", "Mend"),
        ("a.jsonl", ROW + "\0\0\0\n", r"a\.jsonl could not be read: JSON parse error", "Mend"),
        ("a.jsonl", "1\n2\n", "changed from object to number in row 0", "Mend"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "can't decode byte 0xe9", "iconv"),
        ("a.json", '[{"text": "a"},\n {"text": }]', r"a\.json could .*Expected object or value", "Mend"),
        ("a.txt", b"fine\ncaf\xe9\n", "can't decode byte 0xe9", "iconv"),
        ("a.parquet", PARQUET[:-20], r"a\.parquet could .*Parquet magic bytes not found", "bring it again"),
        ("a.parquet", PARQUET, r"a\.parquet could not be read: .+", "bring it again"),
    ],
)
def test_a_broken_file_is_named_in_the_words_of_its_reader(tmp_path, name, content, message, hint, streaming):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(AssetError, match=message) as caught:
        read(str(file), streaming=streaming)
    assert re.search(hint, caught.value.hint)


def test_a_broken_file_is_found_among_sound_ones(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, content in {"a": "", "b": ROW, "c": ROW + '{"text', "d": ROW}.items():
        (folder / f"{name}.jsonl").write_text(content)
    with pytest.raises(AssetError, match=r"c\.jsonl could not be read: .* in row 1"):
        read(str(folder))


def test_a_stream_stops_at_the_broken_place_when_it_is_reached(tmp_path):
    # pandas reads 10,000 rows at once: the first ones are sound.
    file = tmp_path / "data.csv"
    file.write_text("text,n\n" + "a,1\n" * 12_000 + "b,2,3\n")
    rows = iter(opened(str(file), streaming=True).rows)
    assert next(rows) == {"text": "a", "n": 1}
    with pytest.raises(AssetError, match=r"data\.csv could not be read: .* in line 12002, saw 3"):
        list(rows)


@STREAMED
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", ""),
        ("a.csv", ""),
        ("a.csv", "text,n\n"),
        ("a.json", ""),
        ("a.json", "[]"),
        ("a.jsonl", ""),
        ("a.jsonl", "\n\n"),
        ("a.parquet", ""),
    ],
)
def test_an_empty_file_is_named(tmp_path, name, content, streaming):
    (tmp_path / name).write_text(content)
    with pytest.raises(AssetError, match=r"a\.\w+.* is empty"):
        read(str(tmp_path / name), streaming=streaming)


# -- streams --------------------------------------------------------------------------------------


def test_workers_share_the_files_of_a_stream(tmp_path, monkeypatch):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [f"{name}1", f"{name}2"])
    rows = opened(str(tmp_path / "*.jsonl"), streaming=True).rows
    assert rows.num_shards == 3
    seen = []
    for worker in range(2):
        told = SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr("torch.utils.data.get_worker_info", lambda told=told: told)
        seen.append({row["text"] for row in rows})
    assert not seen[0] & seen[1]
    assert sorted(seen[0] | seen[1]) == ["a1", "a2", "b1", "b2", "c1", "c2"]


# -- hub ------------------------------------------------------------------------------------------


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    path = write(tmp_path / "data.jsonl")
    with pytest.raises(AssetError, match=r"split 'tset'.*\['train'\]"):
        read(path, split="tset")


@STREAMED
def test_a_hub_that_cannot_be_reached_says_what_was_wanted(streaming):
    with pytest.raises(AssetError, match="could not be reached for the dataset 'nobody/nothing'") as caught:
        read("nobody/nothing", streaming=streaming)
    assert "connection" in caught.value.hint


def test_a_dataset_that_the_hub_does_not_have_is_named(monkeypatch):
    def not_found(**_):
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr("trahiv_cli.assets.sources.load_dataset", not_found)
    with pytest.raises(AssetError, match="no dataset 'nobody/nothing' on the hub") as caught:
        read("nobody/nothing")
    assert "hf auth login" in caught.value.hint


def test_only_names_that_others_can_find_are_named(tmp_path):
    paths = ["owner/name", "squad", TEXT, str(tmp_path), "texts/data.jsonl", "texts/*"]
    assert hub_names([DatasetSection(path=path) for path in paths]) == ["owner/name", "squad"]
