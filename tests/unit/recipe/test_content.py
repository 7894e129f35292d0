"""Local data is what it holds: which files count, what equals what, and what is said of what is missing."""

import hashlib
import os

import pytest

from trahiv_cli.errors import AssetError, RecipeMismatch
from trahiv_cli.recipe import content
from trahiv_cli.recipe.builtin import TEXT, version
from trahiv_cli.recipe.content import content_of, knows_contents, local_files, read_contents, size_in_words
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import DatasetSection


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Write files below the working directory: path -> text."""
    monkeypatch.chdir(tmp_path)

    def put(texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return put


def files_of(path, **more):
    return [file.as_posix() for file in local_files(DatasetSection(path=path, **more))]


def held_by(path, **more):
    return content_of(DatasetSection(path=path, **more))


def recipe_of(*paths):
    datasets = ", ".join(f"{{path: '{path}'}}" for path in paths)
    return load_recipe("quickstart", [f"data.datasets=[{datasets}]"]).recipe


def test_the_hash_of_a_file_is_what_sha256sum_prints(put):
    put({"chat.jsonl": "hello\n"})
    held = held_by("chat.jsonl")
    assert held.sha256 == hashlib.sha256(b"hello\n").hexdigest()
    assert (held.num_files, held.num_bytes, held.readers) == (1, 6, ["json"])


def test_equal_content_is_equal_under_any_name_and_in_any_form(put):
    put({"a/1.jsonl": "x", "a/2.jsonl": "y", "b/first.json": "x", "b/last.jsonl": "y", "b/c.csv": ""})
    for path, more in (("a/*.jsonl", {}), ("b", {"data_files": ["last.jsonl", "first.json"]}), ("./a", {})):
        assert held_by(path, **more) == held_by("a")


@pytest.mark.parametrize(
    ("texts", "path"),
    [
        ({"b.jsonl": "xz"}, "b.jsonl"),
        ({"b/1.jsonl": "xy"}, "b"),
        ({"b/1.jsonl": "", "b/2.jsonl": "xy"}, "b"),
        ({"b/1.jsonl": "y", "b/2.jsonl": "x"}, "b"),
        ({"b/1.txt": "x", "b/2.txt": "y"}, "b"),
    ],
)
def test_other_bytes_boundaries_order_or_kinds_are_other_content(put, texts, path):
    put({"a/1.jsonl": "x", "a/2.jsonl": "y", **texts})
    assert held_by(path) != held_by("a")


def test_of_a_folder_every_data_file_counts_in_the_order_of_the_names(put):
    put(
        {
            "data/b.jsonl": "1",
            "data/a-b/x.csv": "2",
            "data/a/y.txt": "3",
            "data/README.md": "no",
            "data/.hidden.jsonl": "no",
            "data/.cache/z.jsonl": "no",
            "data/__pycache__/z.jsonl": "no",
            "data/dataset_info.json": "no",
        }
    )
    assert files_of("data") == ["data/a/y.txt", "data/a-b/x.csv", "data/b.jsonl"]
    assert held_by("data").readers == ["csv", "json", "text"]


def test_data_files_are_chosen_inside_a_folder_by_name_or_pattern(put):
    put({"da[t]a/a.csv": "1", "da[t]a/b.csv": "2", "da[t]a/sub/c.csv": "3"})
    assert files_of("da[t]a", data_files="b.csv") == ["da[t]a/b.csv"]
    assert files_of("da[t]a", data_files=["sub/*.csv", "a.csv", "?.csv"]) == [
        "da[t]a/a.csv",
        "da[t]a/b.csv",
        "da[t]a/sub/c.csv",
    ]


def test_a_home_is_expanded(put, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put({"chat.jsonl": "x"})
    assert held_by("~/chat.jsonl") == held_by("chat.jsonl")


@pytest.mark.parametrize(
    ("path", "more", "message", "hint"),
    [
        ("chat.jsonl", {}, "There is no file or folder 'chat.jsonl'.", "Did you mean 'chats.jsonl'?"),
        (
            "no/x.jsonl",
            {},
            "There is no file or folder 'no/x.jsonl'.",
            "The folder 'no' does not exist either.",
        ),
        ("*.csv", {}, "No file matches '*.csv'.", "Patterns are relative to the recipe."),
        (
            "empty",
            {},
            "The folder 'empty' holds no data files.",
            "Looked for .txt .jsonl .json .csv .parquet.",
        ),
        (
            "chats.jsonl",
            {"data_files": "x.jsonl"},
            "'chats.jsonl' is no folder, so there are no `data_files` in it.",
            "Remove `data_files`, or name a folder in `path`.",
        ),
        (
            "data",
            {"data_files": ["tain.csv"]},
            "There is no file 'tain.csv' in the folder 'data'.",
            "Did you mean 'data/train.csv'?",
        ),
        (
            "./chat.xyz",
            {},
            "'chat.xyz' has a suffix that is not known.",
            "Known are .txt .jsonl .json .csv .parquet.",
        ),
    ],
)
def test_what_is_not_there_is_said_with_what_could_be_meant(put, path, more, message, hint):
    put({"chats.jsonl": "x", "empty/README.md": "x", "data/train.csv": "x", "chat.xyz": "x"})
    with pytest.raises(AssetError) as caught:
        held_by(path, **more)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_said(put, tmp_path):
    put({"chat.jsonl": "x"})
    (tmp_path / "chat.jsonl").chmod(0)
    with pytest.raises(AssetError, match="can't be read: Permission denied"):
        held_by("chat.jsonl")


def test_everything_that_is_missing_is_listed(put, tmp_path):
    put({"here.jsonl": "x"})
    with pytest.raises(AssetError) as caught:
        read_contents(recipe_of("a.jsonl", "here.jsonl", "owner/hub", "b.csv"))
    missing = [f"There is no file or folder '{tmp_path}/{name}'." for name in ("a.jsonl", "b.csv")]
    assert caught.value.message == "\n".join(missing)


def test_only_data_of_files_gets_a_content(put):
    put({"a.jsonl": "x"})
    recipe = recipe_of(TEXT, "a.jsonl", "owner/hub")
    assert not knows_contents(recipe)
    read = read_contents(recipe)
    assert [dataset.content is not None for dataset in read.data.datasets] == [True, True, False]
    assert knows_contents(read)
    assert read_contents(read) == read


def with_content(recipe, **changes):
    """The recipe as another peer has it, whose built-in text is another one."""
    [dataset] = recipe.data.datasets
    other = dataset.content.model_copy(update={"sha256": "0" * 64, **changes})
    data = recipe.data.model_copy(update={"datasets": [dataset.model_copy(update={"content": other})]})
    return recipe.model_copy(update={"data": data})


def test_another_versions_text_is_told_as_another_version():
    theirs = with_content(read_contents(recipe_of(TEXT)), version="99.1")
    with pytest.raises(RecipeMismatch, match=f"They have trahiv 99.1, you have {version()}") as caught:
        read_contents(theirs)
    assert "install trahiv 99.1" in caught.value.hint


def test_a_copy_of_the_same_version_that_was_edited_is_told_as_that():
    with pytest.raises(RecipeMismatch, match="one of the two copies was edited") as caught:
        read_contents(with_content(read_contents(recipe_of(TEXT))))
    assert "same commit" in caught.value.hint


def test_a_file_is_read_once_unless_it_changes(put, tmp_path, monkeypatch):
    put({"a.jsonl": "x"})
    first = held_by("a.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(content.hashlib, "file_digest", None)
        assert held_by("a.jsonl") == first
    put({"a.jsonl": "yy"})
    assert held_by("a.jsonl").sha256 == hashlib.sha256(b"yy").hexdigest()


def test_a_size_is_said_in_a_readable_unit():
    assert size_in_words(99_999) == "99999 bytes"
    assert size_in_words(3_400_000) == "3.4 MB"
    assert size_in_words(12_345_678_901) == "12,345.7 MB"
