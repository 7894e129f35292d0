"""Local data is known by its content: files that count, equality, missing files, and places of copies."""

import hashlib
import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from trahiv_cli.errors import AssetError, RecipeMismatch
from trahiv_cli.recipe import builtin, content
from trahiv_cli.recipe.builtin import TEXT, builtin_recipes, text_files, version
from trahiv_cli.recipe.content import content_of, knows_contents, local_files, read_contents, with_copies
from trahiv_cli.recipe.load import load_recipe, parse_recipe
from trahiv_cli.recipe.schema import DatasetSection


def files_of(path, **more):
    return [file.as_posix() for file in local_files(DatasetSection(path=path, **more))]


def held_by(path, **more):
    return content_of(DatasetSection(path=str(path), **more))


def recipe_of(*paths):
    datasets = ", ".join(f"{{path: '{path}'}}" for path in paths)
    return load_recipe("quickstart", [f"data.datasets=[{datasets}]"]).recipe


def test_content_hash_is_cached_sha256(put, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put({"chat.jsonl": "hello\n"})
    held = held_by("chat.jsonl")
    assert held.sha256 == hashlib.sha256(b"hello\n").hexdigest()
    assert (held.num_files, held.num_bytes, held.readers) == (1, 6, ["json"])
    with monkeypatch.context() as patched:
        patched.setattr(content.hashlib, "file_digest", None)
        assert held_by("chat.jsonl") == held
    assert held_by("~/chat.jsonl") == held
    put({"chat.jsonl": "yy"})  # read again after a change
    assert held_by("chat.jsonl").sha256 == hashlib.sha256(b"yy").hexdigest()


@pytest.mark.parametrize(
    ("texts", "path", "data_files", "is_equal"),
    [
        ({}, "a/*.jsonl", None, True),
        ({"b/1.json": "x", "b/2.jsonl": "y", "b/c.csv": ""}, "b", ["2.jsonl", "1.json"], True),
        ({"b/1.jsonl": "xy"}, "b", None, False),
        ({"b/1.jsonl": "", "b/2.jsonl": "xy"}, "b", None, False),
        ({"b/1.jsonl": "y", "b/2.jsonl": "x"}, "b", None, False),
        ({"b/1.txt": "x", "b/2.txt": "y"}, "b", None, False),
    ],
)
def test_content_ignores_only_file_names(put, texts, path, data_files, is_equal):
    put({"a/1.jsonl": "x", "a/2.jsonl": "y", **texts})
    assert (held_by(path, data_files=data_files) == held_by("a")) is is_equal


def test_folder_content_counts_chosen_data_files(put):
    read = dict.fromkeys(("d[t]/b.jsonl", "d[t]/a-b/x.csv", "d[t]/a/y.txt"), "1")
    hidden = (".hidden.jsonl", ".cache/z.jsonl", "__pycache__/z.jsonl")
    put(read | {f"d[t]/{name}": "no" for name in ("README.md", "dataset_info.json", *hidden)})
    assert files_of("d[t]") == ["d[t]/a/y.txt", "d[t]/a-b/x.csv", "d[t]/b.jsonl"]
    assert held_by("d[t]").readers == ["csv", "json", "text"]
    assert files_of("d[t]", data_files="b.jsonl") == ["d[t]/b.jsonl"]
    assert files_of("d[t]", data_files=["a-b/*", "b.jsonl", "?.jsonl"]) == ["d[t]/a-b/x.csv", "d[t]/b.jsonl"]


@pytest.mark.parametrize(
    ("path", "files", "message", "hint"),
    [
        ("chat.jsonl", None, "There is no file or folder 'chat.jsonl'.", "Did you mean 'chats.jsonl'?"),
        ("empty", None, "The folder 'empty' holds no data files.", "Known are .txt .jsonl .json .csv .par"),
        ("./chat.xyz", None, "'chat.xyz' has a suffix that is not known.", "Known are .txt"),
        ("chats.jsonl", "x", "There is no file or folder 'chats.jsonl/x'.", "Looked in "),
    ],
)
def test_missing_path_gets_suggestion(put, path, files, message, hint):
    put({"chats.jsonl": "x", "empty/README.md": "x", "chat.xyz": "x"})
    with pytest.raises(AssetError) as caught:
        held_by(path, data_files=files)
    assert caught.value.message == message and caught.value.hint.startswith(hint)


def test_only_local_data_gets_content(put, tmp_path):
    put({"here.jsonl": "x"})
    recipe = recipe_of(TEXT, "here.jsonl", "owner/hub")
    read = read_contents(recipe)
    assert [dataset.content is not None for dataset in read.data.datasets] == [True, True, False]
    assert (knows_contents(recipe), knows_contents(read)) == (False, True)
    assert read_contents(read) == read
    with pytest.raises(AssetError) as caught:
        read_contents(recipe_of("a.jsonl", "here.jsonl", "owner/hub", "b.csv"))
    missing = [f"There is no file or folder '{tmp_path}/{name}'." for name in ("a.jsonl", "b.csv")]
    assert caught.value.message == "\n".join(missing)


def test_other_builtin_text_names_version():
    recipe = read_contents(recipe_of(TEXT))
    wanted = recipe.to_data()
    wanted["data"]["datasets"][0]["content"] |= {"sha256": "0" * 64, "version": "99.1"}
    with pytest.raises(RecipeMismatch, match="is not what the run trains on") as caught:
        read_contents(parse_recipe(wanted, "the swarm"))
    assert caught.value.hint.startswith("install trahiv 99.1 unchanged on all machines")
    assert ("data.datasets.0.content.version", version(), "99.1") in caught.value.differences


def test_wheel_has_same_builtin_files(tmp_path, monkeypatch):
    root = Path(__file__).parents[3]
    in_checkout, recipes = content_of(DatasetSection(path=TEXT)), sorted(builtin_recipes())
    names = [file.relative_to(root).as_posix() for file in text_files()]
    assert names[0].startswith("docs/") and names[-1].startswith("trahiv_cli/")
    assert names == sorted(names, key=lambda name: Path(name).parts), "as everywhere"
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source in wheel["only-include"]:
        place = tmp_path / wheel["sources"].get(source, source)
        shutil.copytree(root / source, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(builtin, "_PACKAGE", tmp_path / "trahiv_cli")
    assert content_of(DatasetSection(path=TEXT)) == in_checkout
    assert sorted(builtin_recipes()) == recipes


def found(path, folder):
    """Where the copy is of the data that a swarm's starter has at `path`."""
    dataset = f"{{path: 'local:data', content: {json.dumps(held_by(path).model_dump())}}}"
    recipe = load_recipe("quickstart", [f"data.datasets=[{dataset}]"]).recipe
    return with_copies(recipe, folder).data.datasets[0].path


THREE = {"starter/1.jsonl": "x", "starter/2.jsonl": "yy", "starter/more/3.csv": "z"}


@pytest.mark.parametrize(
    ("texts", "wanted", "place"),
    [
        ({"mine/a/b/c.jsonl": "yy", "mine/a/b/d.jsonl": "zz"}, "starter/2.jsonl", "mine/a/b/c.jsonl"),
        ({"mine/a.txt": "yy", "mine/b.jsonl": "zz", "mine/c.jsonl": "yyy"}, "starter/2.jsonl", None),
        ({"mine/.hidden/a.jsonl": "yy", "mine/.a.jsonl": "yy", "mine/a": "yy"}, "starter/2.jsonl", None),
        ({"mine/a.csv": "z"}, "starter/more", "mine/a.csv"),
        ({"mine/in/a.json": "x", "mine/in/b/c.json": "yy", "mine/d.csv": ""}, "starter/*.jsonl", "mine/in"),
        ({"mine/b.jsonl": "x", "mine/a.jsonl": "yy"}, "starter/*.jsonl", None),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c.csv": ""}, "starter/*.jsonl", None),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c/d.csv": "z"}, "starter", "mine"),
    ],
)
def test_copy_is_found_by_content(put, tmp_path, texts, wanted, place):
    put(THREE | {"mine/notes.md": ""} | texts)
    assert found(tmp_path / wanted, tmp_path / "mine") == (str(tmp_path / place) if place else "local:data")


def test_search_survives_loops_pipes_and_links(put, tmp_path):
    put({"starter.jsonl": "yy", "blobs/ab12": "yy", "mine/z/notes.md": ""})
    mine = tmp_path / "mine"
    (mine / "z/copy.jsonl").symlink_to(tmp_path / "blobs/ab12")  # a link to a file is that file
    (mine / "loop").symlink_to(mine)
    (mine / "self.jsonl").symlink_to(mine / "self.jsonl")
    (mine / "broken.jsonl").symlink_to(mine / "nowhere")
    os.mkfifo(mine / "pipe.jsonl")
    os.symlink(os.fsencode(tmp_path / "blobs/ab12"), os.fsencode(mine) + b"/a\xff.jsonl")
    assert found(tmp_path / "starter.jsonl", mine) == f"{mine}/z/copy.jsonl"


def test_moved_data_is_found(put, tmp_path):
    put({"a/1.jsonl": "x", "a/2.jsonl": "yy", "b.jsonl": "z"})
    paths = "[{path: a, data_files: '*.jsonl'}, {path: b.jsonl}, {path: owner/data}]"
    recipe = read_contents(load_recipe("quickstart", [f"data.datasets={paths}"]).recipe)
    (tmp_path / "a").rename(tmp_path / "moved")
    moved = with_copies(recipe, tmp_path).data.datasets
    assert [dataset.path for dataset in moved] == [f"{tmp_path}/moved", f"{tmp_path}/b.jsonl", "owner/data"]
    assert moved[0].data_files is None
