"""A recipe as bytes: its size, what a joiner accepts from a stranger, and what it refuses."""

import copy
import json
import random
import tracemalloc
import zlib
from functools import reduce
from operator import getitem

import pytest

from tests.unit.conftest import refused
from tests.unit.recipe.conftest import LOADED, of_file, quickstart
from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import agreement, fingerprint, resolve, run_id
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import Document, dotted, leaves, read_location
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, MAX_RECIPE_BYTES, from_wire, pack, to_wire, unpack

SFT = ("clm=", "task=sft")
SEQ_CLS = ("clm=", "task=seq-cls", "seq_cls.labels=[no, yes]")


def wire(*overrides):
    return to_wire(quickstart(*LOADED, *overrides))


def with_value(sent, place, value, part="shared"):
    """Set a value in a published recipe."""
    Document(sent[part], "").put(read_location(place), value)
    return sent


def refusal_of(obj, files=None):
    with pytest.raises(RecipeError) as caught:
        from_wire(obj, files=files)
    assert caught.value.findings
    return caught.value


@pytest.mark.parametrize("name", builtin_recipes())
def test_recipe_survives_wire_round_trip(name):
    sent = load_recipe(name).recipe
    arrived = from_wire(unpack(pack(sent) + b"the rest of an older one"))
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(sent))
    assert arrived.hivemind_config.opt.run_id == run_id(sent)


PACKED = pack(resolve(quickstart()))
NOISE = {
    "truncated": PACKED[:-20],
    "bit rot": PACKED[:40] + b"\0\0\0\0" + PACKED[44:],
    "too long deflated": PACKED + bytes(MAX_PACKED_BYTES),
    "a bomb": zlib.compress(b" " * 3_000_000),
    "a bomb around a recipe": zlib.compress(b'{"shared": {}}' + b" " * MAX_RECIPE_BYTES),
    "another JSON value": zlib.compress(b"[]"),
    "nested too deep to read": zlib.compress(b'{"shared": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_and_bombs_are_refused(kind):
    tracemalloc.start()
    with pytest.raises(RecipeError):
        unpack(NOISE[kind])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000, "an inflated bomb has 3 MB"


@pytest.mark.parametrize(
    ("culprit", "overrides"),
    [
        (
            "data.chat_template",
            [*SFT, 'data.chat_template="{' + 64_000 * r"\n" + '"', "model.config.notes=" + "x" * 9_000],
        ),
        ("model.config.notes", [f"model.config.notes=x{random.Random(0).getrandbits(120_000):x}"]),
    ],
)
def test_oversized_recipe_names_longest_part(culprit, overrides):
    with refused("too long to travel", f"`{culprit}` takes ", RecipeError):
        pack(resolve(quickstart(*overrides)))


def test_unacceptable_recipe_is_refused_before_publishing():
    with refused("No other peer would take this recipe over", error=RecipeError) as caught:
        pack(quickstart("model.config.notes=/home/me/model"))
    (finding,) = caught.value.findings
    assert (finding.path, finding.file) == ("model.config.notes", "")


def test_suggestions_travel_without_secrets():
    own = ("training.report_to=[wandb]", "hivemind_config.dht.identity_path=/home/me/key")
    suggested = ("training.per_device_train_batch_size=3", "hivemind_config.opt.averaging_timeout=77")
    sent = quickstart(*own, *suggested)
    before = to_wire(sent)
    arrived = from_wire(before)
    assert before == to_wire(sent), "what was sent is as it was"
    assert arrived.training.per_device_train_batch_size == 3
    assert arrived.hivemind_config.opt.averaging_timeout == 77
    assert arrived.training.report_to == []
    assert arrived.hivemind_config.dht.identity_path is None


def test_local_files_must_be_brought(put):
    folder = put({"starter/chat.jsonl": "1234", "many/a.jsonl": "1", "many/b.jsonl": "22", "base/x": ""})
    sent = to_wire(of_file(folder / "starter/chat.jsonl"))
    wanted = "the starter trains on its own `chat.jsonl` (1 file, 4 bytes, SHA-256 03ac674216f3): "
    bring = "bring a copy, and name the folder that it is in: `--files DIR`"
    assert refusal_of(sent).hint == wanted + bring
    assert refusal_of(sent, folder / "many").hint == f"{wanted}{folder}/many has no copy in it or below"
    assert from_wire(sent, files=folder).data.datasets[0].path == f"{folder}/starter/chat.jsonl"
    assert refusal_of(to_wire(of_file(folder / "many"))).hint == (
        f"the starter trains on its own `many` (2 files, 3 bytes, SHA-256 690ee061fc4e): {bring}. "
        "File names must sort in the same order, and there may be no other data files"
    )
    hint = "the starter has its own folder `base`: bring a copy and `--set model.model_name_or_path=FOLDER`"
    assert refusal_of(to_wire(quickstart("model={model_name_or_path: ./base}"))).hint == hint


@pytest.mark.parametrize(
    ("overrides", "place", "value"),
    [
        (SEQ_CLS, "seq_cls.labels", ["/r/python", "~", "a::b", "local:x", "../up"]),
        (SEQ_CLS, "data.datasets.0.columns", {"/home": "text", "a::b": "label"}),
        (
            SFT,
            "data.chat_template",
            "{%- for message in messages[::-1] %}{{ 'https://x /etc ../' }}\n{%- endfor %}",
        ),
        (["peft.r=4"], "peft.target_modules", ["q_proj"]),
    ],
)
def test_path_like_words_are_accepted(overrides, place, value):
    arrived = from_wire(with_value(wire(*overrides), place, value))
    assert reduce(getitem, read_location(place), arrived.to_data()) == value


PLACES = [
    "/etc/passwd",
    "../secrets",
    "~/mail",
    "a/b/c",
    "./x",
    "mail.txt",
    "*.csv",
    "C:\\Users",
    "owner/..",
    "file:///etc/passwd",
    "https://example.org/x",
    "zip://a::b",
    "local:../../etc/passwd",
    "local:",
    "local:a\x1b[2J",
    "json",
    "",
    "Documents",
]
NAMES = ["model.model_name_or_path", "model.tokenizer_name_or_path", "data.datasets.0.path"]
FILES = ["/etc/passwd", ["ok.txt", "../x"], "a/../../x", "file:/etc/passwd", ["a.csv", "local:b.csv"]]
NAMED = [
    *((name, place) for name in NAMES for place in PLACES),
    *(("data.datasets.0.data_files", files) for files in FILES),
    ("model.config", {"model_type": "llama", "deep": [[{"x": "/etc"}]]}),
]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        *((*named, "names a place on this machine") for named in NAMED),
        ("model.trust_remote_code", True, "unknown key"),
        ("model.config", {"model_type": "llama", "deep": [{"auto_map": "x"}]}, "which `config` must not do"),
        ("hivemind_config.dht", {"host_maddrs": {"x": 1}}, "this peer's own choice"),
        ("hivemind_config.opt.tracker_opts", {"x": 1}, "this peer's own choice"),
    ],
)
def test_stranger_paths_and_code_are_refused(put, place, value, message):
    put({"Documents/x": ""})
    (finding,) = refusal_of(with_value(wire(), place, value)).findings
    assert finding.path.startswith(place)
    assert message in finding.message


CONTENT = {"sha256": "0" * 64, "num_files": 1, "num_bytes": 1, "readers": ["json"]}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("seq_cls.labels", ["x", ""]),
        ("seq_cls.labels", ["x"] * 3_000),
        ("data.chat_template", "chat.jinja"),
        ("data.chat_template", "~/x.j2"),
        ("data.chat_template", "chatml"),
        ("data.chat_template", "{" * 200_000),
        ("data.datasets.0.columns", {"a": ["text"]}),
        ("data.datasets.0.content", CONTENT | {"sha256": "../etc"}),
        ("data.datasets.0.content", CONTENT | {"readers": ["pickle"]}),
        ("quantization", {"load_in_4bit": True, "bnb_4bit_quant_storage": "float64"}),
        ("quantization", {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}),
        ("swarm.solo", "after " + "9" * 400 + " seconds"),
        ("peft.target_modules", "(a+)+$"),
    ],
)
def test_stranger_values_are_bounded(put, place, value):
    put({"chat.jinja": "{{ secret }}"})
    findings = refusal_of(with_value(wire(*SEQ_CLS, "peft.r=4"), place, value)).findings
    assert any(finding.path.startswith(place) or not finding.path for finding in findings)


@pytest.mark.parametrize("place", ["hivemind_config.dht.host_maddrs", "hivemind_config.opt.tracker_opts"])
def test_suggested_own_field_is_refused(place):
    (finding,) = refusal_of(with_value(wire(), place, {"x": 1}, "suggested")).findings
    assert "not something that a swarm may suggest" in finding.message


def of_form(shared, suggested=None, **more):
    return {"v": 1, "shared": shared, "suggested": suggested or {}, **more}


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"v": 1, "shared": {}},
        of_form([]),
        of_form({}, v=True),
        of_form({}, more=1),
        of_form({1: 2}),
        of_form({"x": b"bytes"}),
        of_form({"x": float("nan")}),
        of_form({"x": 10**400}),
        of_form({"x": "\ud800"}),
        of_form({"x": "y" * 200_000}),
        of_form({"x": [0] * 10_000}),
        of_form(json.loads('{"x":' * 900 + "1" + "}" * 900)),
        of_form({"training": 5}, {"training": {"save_steps": 5}}),
    ],
)
def test_malformed_message_raises_recipe_error(obj):
    refusal_of(obj)


def test_recipe_of_other_version_is_refused():
    sent = wire() | {"v": 2, "more": 1}
    refusal = refusal_of(unpack(zlib.compress(json.dumps(sent).encode())))
    assert (refusal.findings[0].path, refusal.hint) == ("v", "use the starter's trahiv")


@pytest.mark.parametrize("junk", [None, -1.5, "x", [[{}]], {"a": 1}, True, "local:x", 10**18], ids=repr)
def test_junk_anywhere_raises_only_recipe_error(junk):
    sent = wire()
    ways = [location for location, _ in leaves(sent["shared"], is_deep=True)]
    for place in {dotted(way[:end]) for way in ways for end in range(1, len(way) + 1)}:
        changed = with_value(copy.deepcopy(sent), place, junk)
        try:
            assert fingerprint(agreement(from_wire(changed)))
        except RecipeError as error:
            assert error.findings
