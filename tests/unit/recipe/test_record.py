"""A recipe as bytes: what fits, what is refused at home, and what a stranger's bytes may not do."""

import json
import random
import string
import tracemalloc
import zlib

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import agreement, fingerprint, resolve, run_id
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, MAX_RECIPE_BYTES, from_wire, pack, unpack


def recipe(*overrides):
    return resolve(load_recipe("quickstart", overrides).recipe)


def deflated(text):
    return zlib.compress(text if isinstance(text, bytes) else text.encode(), level=9)


NOISE = {
    "no bytes": b"",
    "truncated": pack(recipe())[:-20],
    "bit rot": pack(recipe())[:40] + b"\0\0\0\0" + pack(recipe())[44:],
    "too long deflated": b"x" * (MAX_PACKED_BYTES + 1),
    "a bomb": deflated(b" " * 3_000_000),
    "not JSON": deflated("{"),
    "not UTF-8": deflated(b'{"shared": {"a": "\xff"}}'),
    "another JSON value": deflated("[]"),
    "infinity": deflated('{"v": 1, "suggested": {}, "shared": {"a": 1e999}}'),
    "half a character": deflated(r'{"v": 1, "suggested": {}, "shared": {"a": "\ud800"}}'),
    "nested too deep to read": deflated('{"shared": ' + "[" * 20_000 + "]" * 20_000 + "}"),
    "a bomb around a recipe": deflated(b'{"shared": {}}' + b" " * MAX_RECIPE_BYTES),
}


def noise(length, seed=0):
    """Letters that hardly deflate."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_survives_the_trip(name):
    sent = load_recipe(name).recipe
    arrived = from_wire(unpack(pack(sent) + b"the rest of an older one"))
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(sent))
    assert arrived.hivemind_config.opt.run_id == run_id(sent)


@pytest.mark.parametrize("kind", NOISE)
def test_noise_is_not_a_recipe_and_a_bomb_is_inflated_within_its_bound(kind):
    tracemalloc.start()
    with pytest.raises(RecipeError, match="too long" if "bomb" in kind else ""):
        unpack(NOISE[kind])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000 or "bomb" not in kind, "inflated it has 3 MB"


SFT = ("clm=", "task=sft")
LABELS = json.dumps([noise(40, seed=number) for number in range(900)])
LONG_TEXT = 'data.chat_template="{' + 64_000 * r"\n" + '"'


@pytest.mark.parametrize(
    ("culprit", "overrides"),
    [
        ("data.chat_template", (*SFT, f"data.chat_template='{{{noise(20_000)}'")),
        ("data.chat_template", (*SFT, LONG_TEXT, "model.config.notes=" + "x" * 9_000)),
        ("model.config.notes", (f"model.config.notes={noise(20_000)}",)),
        ("data.datasets.0.data_files", (f"data.datasets.0.data_files={LABELS}",)),
    ],
    ids=["a template of noise", "a long template", "a config", "many files"],
)
def test_a_recipe_too_long_to_travel_is_refused_at_home_and_its_longest_part_named(culprit, overrides):
    with pytest.raises(RecipeError) as refused:
        pack(recipe(*overrides))
    assert "too long to travel" in refused.value.message
    assert refused.value.hint.startswith(f"`{culprit}` takes ")


def test_templates_as_long_as_models_have_them_fit():
    names = [noise(12, seed=number) for number in range(200)]
    words = random.Random(1).choices(names, k=1_300)  # 17 KB, deflated 4.3 KB: as the one of gpt-oss
    sent = recipe(*SFT, f"data.chat_template='{{{' '.join(words)}'")
    assert 4_000 < len(pack(sent)) < MAX_PACKED_BYTES


def test_what_no_peer_would_take_over_is_refused_at_home():
    with pytest.raises(RecipeError, match="No other peer would take this recipe over") as refused:
        pack(recipe("model.config._name_or_path=/home/me/model"))
    (finding,) = refused.value.findings
    assert (finding.path, finding.file) == ("model.config._name_or_path", "")
