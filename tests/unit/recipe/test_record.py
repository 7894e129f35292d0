"""A recipe as bytes: its size, what a joiner accepts from a stranger, and what it refuses."""

import copy
import json
import random
import tracemalloc
import zlib
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from tests.unit.conftest import refused
from tests.unit.recipe.conftest import LOADED, error_of, of_file, of_task, quickstart, run_of
from trahiv_cli.errors import RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import AgreedRun, resolve
from trahiv_cli.recipe.builtin import builtin_recipes
from trahiv_cli.recipe.document import dotted, leaves, read_location
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import MAX_PACKED_BYTES, MAX_RECIPE_BYTES, from_wire, pack, to_wire, unpack

SFT = of_task("sft")
SEQ_CLS = of_task("seq-cls")
DATASET = "data.datasets.0"


def wire(*overrides):
    return to_wire(run_of(*LOADED, *overrides))


def with_value(sent, place, value):
    """Set a value in the shared part of a published recipe."""
    *sections, key = read_location(place)
    reduce(getitem, sections, sent["shared"])[key] = value
    return sent


def refusal_of(*arguments):
    error = error_of(from_wire, *arguments)
    assert error.exit_code == 2
    assert error.findings
    return error


@pytest.mark.parametrize("name", builtin_recipes())
def test_recipe_survives_wire_round_trip(name):
    sent = AgreedRun.of(load_recipe(name).recipe)
    arrived = from_wire(unpack(pack(sent) + b"the rest of an older one"))
    assert AgreedRun.of(arrived).fingerprint == sent.fingerprint
    assert arrived.hivemind_config.opt.run_id == sent.run_id


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
    with pytest.raises(RecipeError, match="too long" if "bomb" in kind else None):
        unpack(NOISE[kind])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000 or "bomb" not in kind, "inflated it has 3 MB"


LONG_TEXT = 'data.chat_template="{' + 64_000 * r"\n" + '"'


@pytest.mark.parametrize(
    ("culprit", "overrides"),
    [
        ("data.chat_template", (*SFT, LONG_TEXT, "model.config.notes=" + "x" * 9_000)),
        ("model.config.notes", (f"model.config.notes=x{random.Random(0).getrandbits(120_000):x}",)),
    ],
    ids=["inflated", "deflated"],
)
def test_oversized_recipe_names_longest_part(culprit, overrides):
    error = error_of(pack, run_of(*overrides))
    assert "too long to travel" in error.message
    assert error.hint.startswith(f"`{culprit}` takes ")


def test_unacceptable_recipe_is_refused_before_publishing():
    error = error_of(pack, run_of("model.config.notes=/home/me/model"))
    assert error.message == "No other peer would take this recipe over."
    assert [(found.path, found.file) for found in error.findings] == [("model.config.notes", "")]


def test_suggestions_travel_without_secrets():
    own = ("training.report_to=[wandb]", "hivemind_config.dht.identity_path=/home/me/key")
    suggested = ("training.per_device_train_batch_size=3", "hivemind_config.opt.averaging_timeout=77")
    sent = run_of(*own, *suggested)
    before = to_wire(sent)
    arrived = from_wire(before)
    assert before == to_wire(sent), "what was sent is as it was"
    assert arrived.training.per_device_train_batch_size == 3
    assert arrived.hivemind_config.opt.averaging_timeout == 77
    assert arrived.training.report_to == []
    assert arrived.hivemind_config.dht.identity_path is None
    own = from_wire(before, ["training.per_device_train_batch_size=1"])
    assert own.training.per_device_train_batch_size == 1


def test_local_files_must_be_brought(put):
    folder = put({"starter/chat.jsonl": "1234", "many/a.jsonl": "1", "many/b.jsonl": "22", "base/x": ""})
    sent = to_wire(of_file(folder / "starter/chat.jsonl"))
    wanted = "the starter trains on its own `chat.jsonl` (1 file, 4 bytes, SHA-256 03ac674216f3): "
    bring = "bring a copy, and name the folder that it is in: `--files DIR`"
    assert refusal_of(sent).hint == wanted + bring
    assert refusal_of(to_wire(of_file(folder / "many"))).hint == (
        f"the starter trains on its own `many` (2 files, 3 bytes, SHA-256 690ee061fc4e): {bring}. "
        "File names must sort in the same order, and there may be no other data files"
    )
    there = refusal_of(sent, (), folder / "many").hint
    assert there == f"{wanted}{folder}/many has no copy in it or below"
    assert from_wire(sent, files=folder).data.datasets[0].path == f"{folder}/starter/chat.jsonl"
    set_path = from_wire(sent, ["data.datasets.0.path=/my/own.jsonl"])
    assert set_path.data.datasets[0].path == "/my/own.jsonl"
    model = to_wire(run_of("model={model_name_or_path: ./base}"))
    hint = "the starter has its own folder `base`: bring a copy and `--set model.model_name_or_path=FOLDER`"
    assert refusal_of(model).hint == hint


def test_own_reward_must_be_brought(put):
    put({"starter/mine.py": "def score(**_): pass", "copies/theirs.py": "def score(**_): pass"})
    changes = ("data.datasets.0.path=owner/data", *of_task("grpo"), "grpo.rewards=starter/mine.py:score")
    run = resolve(quickstart(*changes))
    sent = to_wire(run)
    assert sent["shared"]["grpo"]["rewards"][0]["name"] == "local:mine.py:score"
    hint = "get the file from them, read it, and `--set grpo.rewards.0.name=FILE.py:score`"
    assert refusal_of(sent).hint.endswith(hint)
    assert refusal_of(sent, (), Path("copies")).hint.endswith(hint), "code is not searched for"
    brought = from_wire(sent, ["grpo.rewards.0.name=copies/theirs.py:score"])
    assert AgreedRun.of(brought).fingerprint == run.fingerprint
    put({"copies/theirs.py": "def score(**_): return 1"})
    with refused("is not the file that the run takes its rewards from", error=RecipeMismatch):
        resolve(brought)


def test_path_like_words_are_accepted():
    labels = ["/r/python", "~", "a::b", "local:x", "../up"]
    columns = {"/home": "text", "a::b": "label"}
    sent = wire(*SEQ_CLS, f"seq_cls.labels={json.dumps(labels)}")
    arrived = from_wire(with_value(sent, f"{DATASET}.columns", columns))
    assert (arrived.seq_cls.labels, arrived.data.datasets[0].columns) == (labels, columns)
    template = "{%- for message in messages[::-1] %}{{ 'https://x /etc ../' }}\n{%- endfor %}"
    sent = wire(*SFT, f"data.chat_template={json.dumps(template)}")
    assert from_wire(sent).data.chat_template == template
    layers = with_value(wire("peft.r=4"), "peft.target_modules", ["q_proj"])
    assert from_wire(layers).peft.target_modules == ["q_proj"], "names of layers are no pattern"


PLACES = [
    *("/etc/passwd", "../secrets", "~/mail", "a/b/c", "./x", "mail.txt", "*.csv", "C:\\Users", "owner/.."),
    *("file:///etc/passwd", "https://example.org/x", "zip://a::b", "local:../../etc/passwd", "local:"),
    *("local:a\x1b[2J", "json", "", "Documents"),
]
FILES = ["/etc/passwd", "a/../../x", "file:/etc/passwd", ["ok.txt", "../x"], ["a.csv", "local:b.csv"]]
NAMED = {
    "model.model_name_or_path": PLACES,
    "model.tokenizer_name_or_path": PLACES,
    f"{DATASET}.path": PLACES,
    f"{DATASET}.data_files": FILES,
    "model.config": [{"model_type": "llama", "deep": [[{"x": "/etc"}]]}],
}
REFUSED = [
    *((place, value, "names a place on this machine") for place, values in NAMED.items() for value in values),
    ("model.trust_remote_code", True, "unknown key"),
    ("model.config", {"model_type": "llama", "deep": [{"auto_map": "x"}]}, "which `config` must not do"),
    ("hivemind_config.dht", {"host_maddrs": {"x": 1}}, "this peer's own choice"),
    ("hivemind_config.opt.tracker_opts", {"x": 1}, "this peer's own choice"),
]


@pytest.mark.parametrize(("place", "value", "message"), REFUSED)
def test_stranger_paths_and_code_are_refused(put, place, value, message):
    put({"Documents/x": ""})
    (finding,) = refusal_of(with_value(wire(), place, value)).findings
    assert finding.path.startswith(place)
    assert message in finding.message


@pytest.mark.parametrize(
    "name",
    ["mine.py:f", "/tmp/mine.py:f", "../mine.py:f", "local:../mine.py:f", "https://example.org/a.py:f"],
)
def test_stranger_code_is_refused(put, name):
    put({"mine.py": "def f(**_): pass"})
    sent = with_value(wire(*of_task("grpo")), "grpo.rewards", [{"name": name}])
    (finding,) = refusal_of(sent).findings
    assert (finding.path, "names a place on this machine" in finding.message) == ("grpo.rewards.0.name", True)


CONTENT = {"sha256": "0" * 64, "num_files": 1, "num_bytes": 1, "readers": ["json"]}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("seq_cls.labels", labels) for labels in (["x"], ["x", ""], ["x"] * 3_000)),
        *(("data.chat_template", text) for text in ("chat.jinja", "~/x.j2", "chatml", "", "{" * 200_000)),
        (f"{DATASET}.columns", {"a": ["text"]}),
        (f"{DATASET}.content", CONTENT | {"sha256": "../etc"}),
        (f"{DATASET}.content", CONTENT | {"readers": ["pickle"]}),
        ("quantization", {"load_in_4bit": True, "bnb_4bit_quant_storage": "float64"}),
        ("quantization", {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}),
        ("swarm.solo", "after " + "9" * 400 + " seconds"),
        ("peft.target_modules", "(a+)+$"),
        ("extra", 1),
    ],
)
def test_stranger_values_are_bounded(put, place, value):
    put({"chat.jinja": "{{ secret }}"})
    findings = refusal_of(with_value(wire(*SEQ_CLS, "peft.r=4"), place, value)).findings
    assert any(finding.path.startswith(place) or not finding.path for finding in findings)


@pytest.mark.parametrize(("section", "key"), [("dht", "host_maddrs"), ("opt", "tracker_opts")])
def test_suggested_own_field_is_refused(section, key):
    sent = wire()
    sent["suggested"]["hivemind_config"].setdefault(section, {})[key] = {"x": 1}
    assert "not something that a swarm may suggest" in refusal_of(sent).findings[0].message


def of_form(shared, suggested=None, **more):
    return {"v": 1, "shared": shared, "suggested": suggested or {}, **more}


DEEP = json.loads('{"x":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize(
    "obj",
    [
        *(None, {}, {"v": 1, "shared": {}}),
        *(of_form([]), of_form({}, v=2), of_form({}, v=True), of_form({}, more=1)),
        *(of_form({1: 2}), of_form({"x": b"bytes"}), of_form({"x": float("nan")}), of_form({"x": 10**400})),
        *(of_form({"x": "\ud800"}), of_form({"x": "y" * 200_000}), of_form({"x": [0] * 10_000})),
        *(of_form(DEEP), of_form({"training": 5}, {"training": {"save_steps": 5}})),
    ],
)
def test_malformed_message_raises_recipe_error(obj):
    refusal_of(obj)


def test_recipe_of_other_version_is_refused():
    sent = wire() | {"v": 2, "more": 1}
    refused = refusal_of(unpack(zlib.compress(json.dumps(sent).encode())))
    assert (refused.findings[0].path, refused.hint) == ("v", "use the starter's trahiv")


@pytest.mark.parametrize("junk", [None, -1.5, "x", [[{}]], {"a": 1}, True, "local:x", 10**18], ids=repr)
def test_junk_anywhere_raises_only_recipe_error(junk):
    sent = wire()
    ways = [location for location, _ in leaves(sent["shared"], is_deep=True)]
    for place in dict.fromkeys(way[:end] for way in ways for end in range(1, len(way) + 1)):
        try:
            arrived = from_wire(with_value(copy.deepcopy(sent), dotted(place), junk))
        except RecipeError as error:
            assert error.findings
        else:
            assert AgreedRun.of(arrived).fingerprint
