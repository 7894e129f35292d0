"""Pictures in the rows of `sft`, and the processors that read them."""

import hashlib
import json
from dataclasses import replace

import pytest
from PIL import Image

from tests.unit.conftest import refused
from trahiv_cli.assets.data import build_datasets
from trahiv_cli.assets.model import build_tokenizer
from trahiv_cli.assets.pictures import with_pictures
from trahiv_cli.assets.sources import load_rows
from trahiv_cli.errors import AssetError, RecipeError
from trahiv_cli.recipe.builtin import shapes
from trahiv_cli.recipe.examine import require_sound
from trahiv_cli.recipe.load import load_recipe

TALK = {
    "prompt": [{"role": "user", "content": "Which colour?"}],
    "completion": [{"role": "assistant", "content": "red"}],
}


@pytest.fixture
def photos(tmp_path):
    """Write two pictures and rows that name them; return a function that writes other rows."""
    (tmp_path / "photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 4), "red").save(tmp_path / f"photos/{name}.png")
    (tmp_path / "photos/broken.png").write_text("no picture")

    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(TALK | row) + "\n" for row in rows))
        return [f"data.datasets.0.path={file}", "data.eval.test_split_size=0"]

    return write


def splits_of(changes):
    recipe = load_recipe("shapes-sft", changes).recipe
    return build_datasets(recipe, build_tokenizer(recipe), peer_seed=0)


@pytest.mark.parametrize(
    ("row", "column"),
    [({"images": ["photos/a.png", "photos/b.png"]}, "images"), ({"image": "photos/a.png"}, "image")],
)
def test_named_pictures_are_read(photos, row, column):
    splits = splits_of(photos(row, row))
    read = splits.train[0][column]
    pictures = read if column == "images" else [read]
    assert [one.size for one in pictures] == [(8, 4)] * len(pictures)
    assert splits.processing_class is splits.processor
    assert splits.processor.tokenizer is splits.tokenizer


def test_some_rows_may_have_no_picture(photos):
    splits = splits_of(photos({"images": []}, {"images": ["photos/a.png"]}))
    assert sorted(len(row["images"]) for row in splits.train) == [0, 1]
    with refused("Row 2 .*has no 'images'; without a picture it is \\[\\]", "Names are relative", AssetError):
        splits_of(photos({"images": ["photos/a.png"]}, {}))


def test_bad_pictures_are_named_by_row(photos):
    fine = {"images": ["photos/a.png"]}
    loaded = load_recipe("shapes-sft", photos(fine, {"images": ["photos/c.png"]}))
    with pytest.raises(RecipeError) as raised:
        require_sound(loaded.recipe, loaded.document)
    [finding] = raised.value.findings
    assert "Row 2 " in finding.message
    assert "not here: 'photos/c.png'" in finding.message
    with refused(r"Row 2 .*can't be read: 'photos/broken\.png'", "Names are relative", AssetError):
        splits_of(photos(fine, {"images": ["photos/broken.png"]}))


def test_names_from_hub_are_refused(photos):
    changes = photos({"images": ["photos/a.png"]})
    source = load_recipe("shapes-sft", changes).recipe.data.datasets[0]
    opened = load_rows(source, "data.datasets.0", streaming=False)
    elsewhere = replace(opened, source=source.model_copy(update={"path": "owner/photos"}))
    with refused("names of pictures, and not the pictures", "Download the dataset", AssetError):
        with_pictures(elsewhere)


@pytest.mark.parametrize(
    ("changes", "said", "instead"),
    [
        (["model.config={model_type: llama, vocab_size: 2112}"], "a llama can't see them", "columns"),
        (["model.config.image_token_index=7"], "is 7, and <image> has the number 2048", "Set it to 2048"),
        (["model.tokenizer_name_or_path=builtin/bytes"], "has no processor", "builtin/bpe"),
    ],
)
def test_model_that_sees_no_pictures_is_refused(changes, said, instead):
    with refused(said, instead, AssetError):
        splits_of(changes)


def test_rows_without_pictures_need_no_processor(photos):
    splits = splits_of([*photos({}), "model.config={model_type: llama, vocab_size: 2112}"])
    assert splits.processing_class is splits.tokenizer


def test_shapes_are_same_everywhere():
    rows = shapes()
    assert len(rows) == 270
    pixels = b"".join(row["images"][0].tobytes() for row in rows)
    assert hashlib.sha256(pixels).hexdigest()[:16] == "a7cda7c63822b6c7"
