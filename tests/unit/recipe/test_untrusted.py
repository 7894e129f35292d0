"""What a newcomer takes of a recipe that a stranger published, and what is refused."""

import copy
import json

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import agreement, differences, fingerprint
from trahiv_cli.recipe.content import read_contents
from trahiv_cli.recipe.document import dotted
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import from_wire, to_wire

LOADED = ("model.config=", "model.model_name_or_path=owner/model")
SFT = ("clm=", "task=sft")
SEQ_CLS = ("clm=", "task=seq-cls", "seq_cls.labels=[no, yes]")
DATASET = ("data", "datasets", 0)
CONTENT_AT = (*DATASET, "content")


def recipe_with(*overrides):
    return load_recipe("quickstart", overrides).recipe


def wire(*overrides):
    return to_wire(recipe_with(*LOADED, *overrides))


def with_value(sent, value, *place):
    """Put something into the shared part of what a swarm published."""
    *sections, key = place
    at = sent["shared"]
    for section in sections:
        at = at[section]
    at[key] = value
    return sent


def refusal_of(obj, overrides=(), files=None):
    with pytest.raises(RecipeError) as caught:
        from_wire(obj, overrides, files)
    assert caught.value.exit_code == 2 and caught.value.findings
    return caught.value


def test_suggestions_arrive_and_secrets_do_not():
    sent = recipe_with(
        "training.per_device_train_batch_size=3",
        "training.report_to=[wandb]",
        "hivemind_config.dht.identity_path=/home/me/key",
        "hivemind_config.opt.averaging_timeout=77",
    )
    before = to_wire(sent)
    arrived = from_wire(before)
    assert before == to_wire(sent), "what was sent is as it was"
    assert arrived.training.per_device_train_batch_size == 3
    assert arrived.hivemind_config.opt.averaging_timeout == 77
    assert arrived.training.report_to == []
    assert arrived.hivemind_config.dht.identity_path is None
    own = from_wire(before, ["training.per_device_train_batch_size=1"])
    assert own.training.per_device_train_batch_size == 1


def test_local_data_of_the_starter_must_be_brought_and_copies_are_found_in_the_folder_that_is_named(
    put, of_file
):
    texts = {"starter/chat.jsonl": "1234", "joiner/mine.jsonl": "1234", "stranger/chat.jsonl": "1235"}
    folder = put({**texts, "many/a.jsonl": "1", "many/b.jsonl": "22"})
    sent = of_file(folder / "starter/chat.jsonl")
    wanted = "the starter trains on its own `chat.jsonl` (1 file, 4 bytes, SHA-256 03ac674216f3): "
    bring = "bring a copy, and name the folder that it is in: `--files DIR`"
    assert refusal_of(to_wire(sent)).hint == wanted + bring
    assert refusal_of(to_wire(of_file(folder / "many"))).hint == (
        f"the starter trains on its own `many` (2 files, 3 bytes, SHA-256 690ee061fc4e): {bring}. "
        "File names must sort in the same order, and there may be no other data files"
    )
    there = refusal_of(to_wire(sent), files=folder / "stranger").hint
    assert there == f"{wanted}{folder}/stranger has no copy in it or below"
    arrived = read_contents(from_wire(to_wire(sent), files=folder / "joiner"))
    assert arrived.data.datasets[0].path == f"{folder}/joiner/mine.jsonl"
    assert differences(agreement(arrived), agreement(sent)) == ()
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(sent))
    set_path = from_wire(to_wire(sent), ["data.datasets.0.path=/my/own.jsonl"], folder / "joiner")
    assert set_path.data.datasets[0].path == "/my/own.jsonl", "what is set goes first"
    for nonsense in (None, 5, [], {"num_files": True}):
        hint = refusal_of(with_value(to_wire(sent), nonsense, *CONTENT_AT)).hint
        assert hint.endswith("`chat.jsonl`: bring a copy and `--set data.datasets.0.path=FOLDER`")
    files = with_value(wire(), ["a.csv", "local:b.csv"], *DATASET, "data_files")
    assert [finding.path for finding in refusal_of(files).findings] == ["data.datasets.0.data_files.1"]


PLACES = [
    *("/etc/passwd", "../secrets", "~/mail", "a/b/c", "./x", "mail.txt", "*.csv", "C:\\Users", "owner/.."),
    *("file:///etc/passwd", "https://example.org/x", "zip://a::b", "local:../../etc/passwd", "local:"),
    *("local:a\x1b[2J", "json", "", "Documents"),
]
MODEL, TOKENIZER = ("model", "model_name_or_path"), ("model", "tokenizer_name_or_path")
NAMED = [(place, path) for place in (MODEL, TOKENIZER, (*DATASET, "path")) for path in PLACES]
NAMED += [((*DATASET, "data_files"), files) for files in ("/etc/passwd", ["ok.txt", "../x"], "a/../../x")]
NAMED += [(("model", "config"), {"model_type": "llama", "deep": [[{"x": "/etc"}]]})]


@pytest.mark.parametrize(("place", "value"), NAMED)
def test_a_stranger_cannot_name_a_place_on_this_machine(put, place, value):
    put({"Documents/x": ""})
    (finding,) = refusal_of(with_value(wire(), value, *place)).findings
    assert finding.path.startswith(dotted(place)) and "names a place on this machine" in finding.message


def test_a_stranger_cannot_have_a_chat_template_read_from_a_file(put):
    put({"chat.jinja": "{{ secret }}"})
    for template in ("chat.jinja", "~/x.j2", "chatml", ""):
        sent = with_value(wire(*SFT), template, "data", "chat_template")
        assert [finding.path for finding in refusal_of(sent).findings] == ["data.chat_template"]


def test_words_may_look_like_places_where_nothing_is_looked_up():
    labels = ["/r/python", "~", "a::b", "local:x", "../up"]
    columns = {"/home": "text", "a::b": "label"}
    sent = wire(*SEQ_CLS, f"seq_cls.labels={json.dumps(labels)}")
    arrived = from_wire(with_value(sent, columns, "data", "datasets", 0, "columns"))
    assert (arrived.seq_cls.labels, arrived.data.datasets[0].columns) == (labels, columns)
    template = "{%- for message in messages[::-1] %}{{ 'https://x /etc ../' }}\n{%- endfor %}"
    sent = wire(*SFT, f"data.chat_template={json.dumps(template)}")
    assert from_wire(sent).data.chat_template == template
    layers = with_value(wire("peft.r=4"), ["q_proj"], "peft", "target_modules")
    assert from_wire(layers).peft.target_modules == ["q_proj"], "names of layers are no pattern"


CONTENT = {"sha256": "0" * 64, "num_files": 1, "num_bytes": 1, "readers": ["json"]}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("seq_cls", "labels"), labels) for labels in (["x"], ["x", ""], ["x"] * 3_000)),
        (("data", "chat_template"), "{" * 200_000),
        ((*DATASET, "columns"), {"a": ["text"]}),
        (CONTENT_AT, CONTENT | {"sha256": "../etc"}),
        (CONTENT_AT, CONTENT | {"readers": ["pickle"]}),
        (("quantization",), {"load_in_4bit": True, "bnb_4bit_quant_storage": "float64"}),
        (("quantization",), {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}),
        (("swarm", "solo"), "after " + "9" * 400 + " seconds"),
        (("swarm", "robust_mean"), 1),
        (("peft", "target_modules"), "(a+)+$"),
        (("extra",), 1),
    ],
)
def test_what_a_stranger_says_is_bounded_and_said_where_it_is(place, value):
    findings = refusal_of(with_value(wire(*SEQ_CLS, "peft.r=4"), value, *place)).findings
    assert any(finding.path.startswith(dotted(place)) or not finding.path for finding in findings)


def test_a_stranger_cannot_have_code_run():
    for sent in (
        with_value(wire(), True, "model", "trust_remote_code"),
        to_wire(recipe_with("model.config.deep=[{auto_map: x}]")),
    ):
        assert "would run code" in refusal_of(sent).findings[0].message


@pytest.mark.parametrize(("section", "key"), [("dht", "host_maddrs"), ("opt", "averager_opts")])
def test_a_stranger_cannot_set_what_is_this_peers_own(section, key):
    said = {"shared": "this peer's own choice", "suggested": "not something that a swarm may suggest"}
    for part, message in said.items():
        sent = wire()
        sent[part]["hivemind_config"].setdefault(section, {})[key] = {"x": 1}
        assert message in refusal_of(sent).findings[0].message


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def of_form(shared, suggested=None, **more):
    return {"v": 1, "shared": shared, "suggested": suggested or {}, **more}


@pytest.mark.parametrize(
    "obj",
    [
        *(None, {}, {"v": 1, "shared": {}}),
        *(of_form([]), of_form({}, v=2), of_form({}, v=True), of_form({}, more=1)),
        *(of_form({1: 2}), of_form({"x": b"bytes"}), of_form({"x": float("nan")}), of_form({"x": 10**400})),
        *(of_form({"x": "\ud800"}), of_form({"x": "y" * 200_000}), of_form({"x": [0] * 10_000})),
        *(of_form(nested(5_000)), of_form({"training": 5}, {"training": {"save_steps": 5}})),
    ],
)
def test_whatever_a_stranger_sends_is_refused_as_a_recipe_error(obj):
    refusal_of(obj)


def places(data, place=()):
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from places(value, (*place, key))


@pytest.mark.parametrize("junk", [None, -1.5, "x", [[{}]], {"a": 1}, True, "local:x", 10**18], ids=repr)
def test_junk_anywhere_is_either_a_recipe_or_a_recipe_error(junk):
    sent = wire()
    for place in places(sent["shared"]):
        try:
            arrived = from_wire(with_value(copy.deepcopy(sent), junk, *place))
        except RecipeError as error:
            assert error.findings
        else:
            assert fingerprint(agreement(arrived))
