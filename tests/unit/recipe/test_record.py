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
    "not deflated": b"recipe",
    "truncated": pack(recipe())[:-20],
    "bit rot": pack(recipe())[:40] + b"\0\0\0\0" + pack(recipe())[44:],
    "too long deflated": b"x" * (MAX_PACKED_BYTES + 1),
    "a bomb": deflated(b" " * 3_000_000),
    "not JSON": deflated("{"),
    "not UTF-8": deflated(b'{"shared": {"a": "\xff"}}'),
    "another JSON value": deflated("[]"),
    "NaN": deflated('{"v": 1, "suggested": {}, "shared": {"a": NaN}}'),
    "infinity": deflated('{"v": 1, "suggested": {}, "shared": {"a": 1e999}}'),
    "half a character": deflated(r'{"v": 1, "suggested": {}, "shared": {"a": "\ud800"}}'),
    "nested too deep to read": deflated('{"shared": ' + "[" * 20_000 + "]" * 20_000 + "}"),
    "a number too long to read": deflated('{"shared": {"a": ' + "9" * 5_000 + "}}"),
    "a bomb around a recipe": deflated(b'{"shared": {}}' + b" " * MAX_RECIPE_BYTES),
}


def noise(length, seed=0):
    """Letters that hardly deflate."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_survives_the_trip(name):
    sent = load_recipe(name).recipe
    arrived = from_wire(unpack(pack(sent)))
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(sent))
    assert arrived.hivemind_config.opt.run_id == run_id(sent)


def test_what_follows_a_record_does_not_count():
    assert unpack(pack(recipe()) + b"the rest of an older one") == unpack(pack(recipe()))


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
TOO_LONG = {
    "a template of noise": (*SFT, f"data.chat_template='{{{noise(20_000)}'"),
    "a long template": (
        *SFT,
        'data.chat_template="{' + 64_000 * r"\n" + '"',
        "model.config.notes=" + "x" * 9_000,
    ),
    "a config": (f"model.config.notes={noise(20_000)}",),
    "many classes": ("clm=", "task=seq-cls", f"seq_cls.labels={LABELS}"),
    "many files": (f"data.datasets.0.data_files={LABELS}",),
}
CULPRITS = ("data.chat_template", "data.chat_template", "model.config", "seq_cls.labels", "data.datasets")


@pytest.mark.parametrize(("kind", "culprit"), zip(TOO_LONG, CULPRITS, strict=True))
def test_a_recipe_too_long_to_travel_is_refused_at_home_and_its_longest_part_named(kind, culprit):
    with pytest.raises(RecipeError) as refused:
        pack(recipe(*TOO_LONG[kind]))
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
