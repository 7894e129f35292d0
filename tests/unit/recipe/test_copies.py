"""Copies of a starter's data are found by what they hold, in the one folder that was named."""

import os

import pytest

from trahiv_cli.errors import AssetError
from trahiv_cli.recipe import content
from trahiv_cli.recipe.content import content_of, put_copies, with_copies
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.schema import DatasetSection


@pytest.fixture
def put(tmp_path):
    """Write files: path below `tmp_path` -> text."""

    def put(texts):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return put


def asked_for(path):
    """What a swarm says of a dataset that only its starter has."""
    return {"path": "local:data", "content": content_of(DatasetSection(path=str(path))).model_dump()}


def found(path, folder):
    datasets = [asked_for(path)]
    put_copies(datasets, folder)
    return datasets[0]["path"]


THREE = {"starter/1.jsonl": "x", "starter/2.jsonl": "yy", "starter/more/3.csv": "z"}


@pytest.mark.parametrize(
    ("texts", "wanted", "place"),
    [
        ({"mine/other name.json": "yy"}, "starter/2.jsonl", "mine/other name.json"),
        ({"mine/a/b/c.jsonl": "yy", "mine/a/b/d.jsonl": "zz"}, "starter/2.jsonl", "mine/a/b/c.jsonl"),
        ({"mine/a.txt": "yy"}, "starter/2.jsonl", None),
        ({"mine/a.jsonl": "zz"}, "starter/2.jsonl", None),
        ({"mine/a.jsonl": "yyy"}, "starter/2.jsonl", None),
        ({"mine/.hidden/a.jsonl": "yy", "mine/.a.jsonl": "yy"}, "starter/2.jsonl", None),
        ({"mine/a": "yy"}, "starter/2.jsonl", None),
        ({"mine/a.jsonl": "z"}, "starter/more", None),
        ({"mine/a.csv": "z"}, "starter/more", "mine/a.csv"),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy"}, "starter/*.jsonl", "mine"),
        ({"mine/in/a.json": "x", "mine/in/b/c.json": "yy", "mine/d.csv": ""}, "starter/*.jsonl", "mine/in"),
        ({"mine/b.jsonl": "x", "mine/a.jsonl": "yy"}, "starter/*.jsonl", None),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c.csv": ""}, "starter/*.jsonl", None),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/README.md": ""}, "starter/*.jsonl", "mine"),
        ({"mine/a.jsonl": "x", "mine/b.jsonl": "yy", "mine/c/d.csv": "z"}, "starter", "mine"),
    ],
)
def test_a_copy_is_found_by_its_content(put, tmp_path, texts, wanted, place):
    put(THREE | {"mine/notes.md": ""} | texts)
    assert found(tmp_path / wanted, tmp_path / "mine") == (str(tmp_path / place) if place else "local:data")


def test_only_what_fits_by_size_and_suffix_is_read(put, tmp_path, monkeypatch):
    put(
        {
            "starter.jsonl": "yy",
            "mine/a.jsonl": "yyy",
            "mine/b.txt": "yy",
            "mine/c.jsonl": "zz",
            "mine/d.json": "yy",
        }
    )
    wanted, read = asked_for(tmp_path / "starter.jsonl"), []

    def reading(dataset):
        read.append(dataset.path)
        return content_of(dataset)

    monkeypatch.setattr(content, "content_of", reading)
    put_copies([wanted], tmp_path / "mine")
    assert read == [f"{tmp_path}/mine/c.jsonl", f"{tmp_path}/mine/d.json"]


def test_a_folder_with_loops_pipes_and_broken_links_is_looked_through(put, tmp_path):
    put({"starter.jsonl": "yy", "mine/z/copy.jsonl": "yy"})
    mine = tmp_path / "mine"
    (mine / "loop").symlink_to(mine)
    (mine / "self.jsonl").symlink_to(mine / "self.jsonl")
    (mine / "broken.jsonl").symlink_to(mine / "nowhere")
    os.mkfifo(mine / "pipe.jsonl")
    os.close(os.open(os.fsencode(mine) + b"/\xff.jsonl", os.O_CREAT))
    assert found(tmp_path / "starter.jsonl", mine) == f"{mine}/z/copy.jsonl"


def test_a_link_to_a_file_is_that_file(put, tmp_path):
    put({"starter.jsonl": "yy", "blobs/ab12": "yy", "mine/x.md": ""})
    (tmp_path / "mine/data.jsonl").symlink_to(tmp_path / "blobs/ab12")
    assert found(tmp_path / "starter.jsonl", tmp_path / "mine") == f"{tmp_path}/mine/data.jsonl"


def test_what_can_not_be_read_is_passed_over(put, tmp_path, monkeypatch):
    put({"starter.jsonl": "yy", "mine/a.jsonl": "yy", "mine/b.jsonl": "yy"})
    wanted = asked_for(tmp_path / "starter.jsonl")

    def reading(dataset):
        if dataset.path.endswith("a.jsonl"):
            raise AssetError("a.jsonl can't be read: Permission denied.")
        return content_of(dataset)

    monkeypatch.setattr(content, "content_of", reading)
    put_copies([wanted], tmp_path / "mine")
    assert wanted["path"] == f"{tmp_path}/mine/b.jsonl"


def test_a_huge_folder_is_refused_before_anything_is_read(put, tmp_path, monkeypatch):
    put({"starter.jsonl": "yy", "mine/a/copy.jsonl": "yy", "mine/b/1.md": "", "mine/b/2.md": ""})
    monkeypatch.setattr(content, "MAX_FILES", 2)
    with pytest.raises(AssetError, match="more than 2 files in it and below; none was read"):
        found(tmp_path / "starter.jsonl", tmp_path / "mine")


SOUND = {"sha256": "0" * 64, "num_files": 1, "num_bytes": 2, "readers": ["json"]}


@pytest.mark.parametrize(
    "dataset",
    [
        *(None, 5, "x", [], {}, {"path": "local:x"}, {"path": "owner/data"}, {"content": {}}),
        {"path": "local:x", "content": {"sha256": "no", "num_files": 1, "num_bytes": 2, "readers": ["json"]}},
        {"path": "local:x", "content": {"sha256": "0" * 64, "num_files": 1, "num_bytes": 2, "readers": [[]]}},
        {"path": "local:x", "content": None},
        {"path": ["[a]"], "data_files": 5, "content": SOUND},
        {"path": "./x", "data_files": 5, "content": SOUND},
    ],
    ids=repr,
)
def test_a_strangers_nonsense_stays_as_it_is(put, tmp_path, dataset):
    put({"mine/a.jsonl": "yy"})
    datasets = [dataset]
    put_copies(datasets, tmp_path / "mine")
    assert datasets == [dataset]


def test_the_data_of_a_recipe_is_found_where_it_moved_to(put, tmp_path, monkeypatch):
    put({"a/1.jsonl": "x", "a/2.jsonl": "yy", "b.jsonl": "z"})
    monkeypatch.chdir(tmp_path)
    paths = "[{path: a, data_files: '*.jsonl'}, {path: b.jsonl}, {path: owner/data}]"
    recipe = load_recipe("quickstart", [f"data.datasets={paths}"]).recipe
    datasets = [
        dataset.model_copy(update={"content": content_of(dataset)}) if dataset.path[0] == "/" else dataset
        for dataset in recipe.data.datasets
    ]
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"datasets": datasets})})
    (tmp_path / "a").rename(tmp_path / "moved")
    moved = with_copies(recipe, tmp_path).data.datasets
    assert [dataset.path for dataset in moved] == [f"{tmp_path}/moved", f"{tmp_path}/b.jsonl", "owner/data"]
    assert moved[0].data_files is None
