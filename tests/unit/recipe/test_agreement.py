"""What peers share, how it is hashed, and what happens to what a stranger sends."""

import copy
import json

import pytest

from trahiv_cli.errors import RecipeError, RecipeMismatch
from trahiv_cli.recipe.agreement import (
    agreement,
    canonical,
    differences,
    fingerprint,
    resolve,
    run_id,
    what_changed,
)
from trahiv_cli.recipe.content import read_contents
from trahiv_cli.recipe.document import dotted, leaves
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import from_wire, to_wire
from trahiv_cli.recipe.schema import OWN, SUGGESTED, TASK_SECTIONS, marks_of, sections_of_a_recipe

SHARED = """
version name task
model.model_name_or_path model.config model.revision model.tokenizer_name_or_path model.dtype
quantization.load_in_4bit quantization.load_in_8bit quantization.bnb_4bit_quant_type
quantization.bnb_4bit_use_double_quant quantization.llm_int8_threshold quantization.llm_int8_skip_modules
peft.r peft.lora_alpha peft.lora_dropout peft.target_modules peft.modules_to_save
peft.use_rslora peft.use_dora
data.datasets.0.path data.datasets.0.name data.datasets.0.split data.datasets.0.revision
data.datasets.0.data_files data.datasets.0.columns data.datasets.0.fraction
data.datasets.0.content.sha256 data.datasets.0.content.num_files data.datasets.0.content.num_bytes
data.datasets.0.content.readers data.datasets.0.content.version
data.eval.test_split_size data.shuffle data.chat_template
clm.dataset_text_field clm.max_length clm.packing
sft.dataset_text_field sft.max_length sft.packing sft.packing_strategy sft.completion_only_loss
sft.assistant_only_loss sft.loss_type
dpo.beta dpo.loss_type dpo.loss_weights dpo.label_smoothing dpo.max_length
mlm.dataset_text_field mlm.max_length mlm.mlm_probability
seq_cls.labels seq_cls.dataset_text_field seq_cls.dataset_label_field seq_cls.max_length
training.max_steps training.learning_rate training.lr_scheduler_type training.lr_scheduler_kwargs
training.warmup_steps training.optim training.optim_args training.weight_decay training.adam_beta1
training.adam_beta2 training.adam_epsilon training.max_grad_norm training.seed
hivemind_config.opt.run_id hivemind_config.opt.target_batch_size hivemind_config.opt.matchmaking_time
hivemind_config.opt.average_state_every hivemind_config.opt.grad_compression
hivemind_config.opt.state_averaging_compression hivemind_config.opt.load_state_compression
swarm.mode swarm.communication_share swarm.local_steps swarm.fragments swarm.outer_learning_rate
swarm.outer_momentum swarm.solo swarm.min_peers swarm.norm_limit swarm.robust_mean swarm.divide_data
""".split()


def recipe_with(*overrides):
    return load_recipe("quickstart", overrides).recipe


LOADED = ("model.config=", "model.model_name_or_path=owner/model")
OF_TASK = {
    "clm": (),
    "sft": ("clm=", "task=sft"),
    "dpo": ("clm=", "task=dpo"),
    "mlm": ("clm=", "task=mlm"),
    "seq-cls": ("clm=", "task=seq-cls", "seq_cls.labels=[no, yes]"),
}
"""What makes a recipe of another task of the quickstart."""


def wire(*overrides):
    return copy.deepcopy(to_wire(recipe_with(*LOADED, *overrides)))


def refusal_of(obj, overrides=(), files=None):
    with pytest.raises(RecipeError) as caught:
        from_wire(obj, overrides, files)
    assert caught.value.exit_code == 2
    return caught.value


def test_every_field_is_shared_or_own_by_decision():
    sections = sections_of_a_recipe()
    fields = {
        (*place, name)
        for place, fields in sections.items()
        for name in fields
        if not any(inner[: len(place) + 1] == (*place, name) for inner in sections)
    }
    assert {dotted(field) for field in fields if OWN not in marks_of(field)} == set(SHARED)
    assert all(OWN in marks_of(field) for field in fields if SUGGESTED in marks_of(field))


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_the_agreement_holds_exactly_the_shared_fields_of_the_task(task, tmp_path):
    (tmp_path / "chat.jsonl").write_text("{}")
    file = f"data.datasets.0.path={tmp_path}/chat.jsonl"
    recipe = recipe_with("peft.r=4", "quantization.load_in_4bit=true", *LOADED, *OF_TASK[task], file)
    others = {section for other, section in TASK_SECTIONS.items() if other != task}
    held = {dotted(location) for location, _ in leaves(agreement(resolve(recipe)))}
    assert held == {path for path in SHARED if path.partition(".")[0] not in others}


QUANTIZED = ("peft.r=4", "peft.lora_alpha=32", "quantization.load_in_4bit=true", "training.weight_decay=0")


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        *(("training.per_device_train_batch_size=4", True), ("hivemind_config.dht.client_mode=true", True)),
        *(("training.bf16=true", True), ("quantization.bnb_4bit_compute_dtype=float32", True)),
        *(("training.seed=43", False), ("name=other", False), ("clm.packing=false", False)),
        *(("model.dtype=float16", False), ("swarm.robust_mean=true", False), ("swarm.norm_limit=0", False)),
        *(("swarm.solo=never", False), ("swarm.solo=after 300.00 seconds", True), ("swarm={}", True)),
        *(("peft={r: 4}", True), ("training.weight_decay=0.0", True)),  # defaults, of whatever type
    ],
)
def test_shared_values_change_the_fingerprint_and_own_choices_do_not(override, is_same):
    one, other = (agreement(recipe_with(*QUANTIZED, *LOADED, *more)) for more in ((), (override,)))
    assert (fingerprint(one) == fingerprint(other)) is is_same
    changed = set() if is_same else {override.partition("=")[0], "hivemind_config.opt.run_id"}
    assert {path for path, _, _ in differences(one, other)} == changed


def test_the_fingerprint_of_a_known_agreement_never_changes():
    shared = {"b": [1.0, 0.0002, "\u00e9"], "a": None}
    assert canonical(shared) == b'{"a":null,"b":[1,0.0002,"\xc3\xa9"]}'
    assert fingerprint(shared) == "3d5a659ffb6d081bb85e2364bff7bb4a918017f04577889e339cd7885ba648f6"


def test_run_id_is_given_or_made_of_the_name_and_the_agreement_and_can_be_filled_in():
    recipe = recipe_with("data.datasets.0.path=owner/data")
    assert run_id(recipe).startswith("quickstart-") and len(run_id(recipe)) == len("quickstart-") + 8
    assert run_id(recipe_with("hivemind_config.opt.run_id=mine")) == "mine"
    assert len(run_id(recipe_with(f"name={'n' * 48}"))) == 48
    resolved = resolve(recipe)
    assert resolved.hivemind_config.opt.run_id == run_id(recipe)
    assert agreement(resolved) == agreement(recipe) and resolve(resolved) == resolved
    assert "content" not in agreement(resolved)["data"]["datasets"][0], "what is on the hub has none"


def test_differences_are_leaf_by_leaf():
    ours, theirs = agreement(recipe_with()), agreement(recipe_with("training.seed=1", "peft.r=4"))
    found = {path: (our, their) for path, our, their in differences(ours, theirs)}
    assert found["training.seed"] == (42, 1)
    assert found["peft.r"] == (None, 4)
    assert "training.max_steps" not in found
    assert differences(ours, ours) == ()
    assert differences({"a": 1}, {"a": True}) == (("a", 1, True),)


def test_local_paths_never_travel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "model").mkdir()
    recipe = recipe_with(
        "data.datasets=[{path: /home/me/secret/chat.jsonl}, {path: ~/data, data_files: [a/b.txt, c.txt]}, "
        "{path: 'data/*.csv'}, {path: chat.jsonl}, {path: owner/data, data_files: x/y.parquet}]",
        "model={model_name_or_path: owner/model}",
    )
    shared = agreement(recipe)
    assert [dataset["path"] for dataset in shared["data"]["datasets"]] == [
        "local:chat.jsonl",
        "local:data",
        "local:*.csv",
        "local:chat.jsonl",
        "owner/data",
    ]
    assert shared["data"]["datasets"][1]["data_files"] == ["local:b.txt", "local:c.txt"]
    assert shared["data"]["datasets"][4]["data_files"] == "x/y.parquet"
    assert shared["model"]["model_name_or_path"] == "local:model"
    assert "/home/me" not in json.dumps(to_wire(recipe))


def test_suggestions_arrive_and_secrets_do_not():
    sent = recipe_with(
        "training.per_device_train_batch_size=3",
        "training.report_to=[wandb]",
        "hivemind_config.dht.identity_path=/home/me/key",
        "hivemind_config.opt.averaging_timeout=77",
    )
    before = copy.deepcopy(to_wire(sent))
    arrived = from_wire(before)
    assert before == to_wire(sent), "what was sent is as it was"
    assert arrived.training.per_device_train_batch_size == 3
    assert arrived.hivemind_config.opt.averaging_timeout == 77
    assert arrived.training.report_to == []
    assert arrived.hivemind_config.dht.identity_path is None
    own = from_wire(before, ["training.per_device_train_batch_size=1"])
    assert own.training.per_device_train_batch_size == 1


@pytest.fixture
def files(tmp_path):
    """Write files of the starter's and of a joiner's: name below `tmp_path` -> text."""

    def files(**texts):
        for name, text in texts.items():
            folder, _, file = name.rpartition("__")
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{file}.jsonl").write_text(text)
        return tmp_path

    return files


def of_file(path, *overrides):
    return resolve(recipe_with(f"data.datasets.0.path={path}", *overrides))


def test_local_data_of_the_starter_must_be_brought(files):
    folder = files(starter__chat="x" * 3_400_000, many__a="1", many__b="22")
    bring = "bring a copy, and name the folder that it is in: `--files DIR`"
    assert refusal_of(to_wire(of_file(folder / "starter/chat.jsonl"))).hint == (
        f"the starter trains on its own `chat.jsonl` (1 file, 3.4 MB, SHA-256 35fe9efaf419): {bring}"
    )
    assert refusal_of(to_wire(of_file(folder / "many"))).hint == (
        f"the starter trains on its own `many` (2 files, 3 bytes, SHA-256 690ee061fc4e): {bring}. "
        "The file names must sort in the same order, and the folder may hold no other data files"
    )


def test_copies_are_found_in_the_folder_that_is_named(files):
    folder = files(starter__chat="1234", joiner__mine="1234", stranger__chat="1235")
    sent = of_file(folder / "starter/chat.jsonl")
    arrived = read_contents(from_wire(to_wire(sent), files=folder / "joiner"))
    assert arrived.data.datasets[0].path == f"{folder}/joiner/mine.jsonl"
    assert differences(agreement(arrived), agreement(sent)) == ()
    set_path = from_wire(to_wire(sent), ["data.datasets.0.path=/my/own.jsonl"], folder / "joiner")
    assert set_path.data.datasets[0].path == "/my/own.jsonl", "what is set goes first"
    hint = refusal_of(to_wire(sent), files=folder / "stranger").hint
    assert hint.endswith(f"SHA-256 03ac674216f3): {folder}/stranger has no copy in it or below")


@pytest.mark.parametrize(
    ("file", "text", "overrides", "changes"),
    [
        ("chat", "1234", ["training.max_steps=9"], ([], [])),
        ("chat", "1235", [], ([], ["chat.jsonl"])),
        ("chat", "12356", ["training.max_steps=9"], ([], ["chat.jsonl"])),
        ("chat", "1235", ["training.seed=5"], (["training.seed"], ["chat.jsonl"])),
        ("chat", "1234", ["training.seed=5"], (["training.seed"], [])),
        ("other", "1235", [], (["data.datasets.0.content.sha256"], [])),
        ("chat", "1234", ["hivemind_config.opt.run_id=x"], (["hivemind_config.opt.run_id"], [])),
    ],
)
def test_edited_data_is_told_from_another_recipe(files, file, text, overrides, changes):
    folder = files(**{"before__chat": "1234", f"after__{file}": text})
    earlier = of_file(folder / "before/chat.jsonl")
    assert what_changed(earlier, of_file(folder / f"after/{file}.jsonl", *overrides)) == changes


def test_a_copy_of_any_name_and_any_files_of_a_folder_are_the_same_data(files):
    folder = files(starter__a="1", starter__b="2", joiner__a="1", joiner__b="2", joiner__c="3", copy__x="1")
    for starter, *brought in (
        ("starter/a.jsonl", "path={}/copy/x.jsonl"),
        ("starter", "path={}/joiner/[ab].jsonl"),
        ("starter", "path={}/joiner", "data_files=[b.jsonl, a.jsonl]"),
    ):
        sent = of_file(folder / starter)
        overrides = [f"data.datasets.0.{each.format(folder)}" for each in brought]
        arrived = read_contents(from_wire(to_wire(sent), overrides))
        assert differences(agreement(arrived), agreement(sent)) == ()
        assert fingerprint(agreement(arrived)) == fingerprint(agreement(sent))
        assert run_id(arrived) == run_id(sent)


def test_other_data_is_refused_with_both_hashes_and_sizes(files):
    folder = files(starter__chat="1234", joiner__chat="123")
    sent = of_file(folder / "starter/chat.jsonl")
    arrived = from_wire(to_wire(sent), [f"data.datasets.0.path={folder}/joiner/chat.jsonl"])
    with pytest.raises(RecipeMismatch) as refused:
        read_contents(arrived)
    assert refused.value.exit_code == 5
    assert "1 file, 3 bytes, SHA-256 a665a4592042" in refused.value.message
    assert "1 file, 4 bytes, SHA-256 03ac674216f3" in refused.value.message
    assert {path for path, _, _ in refused.value.differences} == {
        "data.datasets.0.content.sha256",
        "data.datasets.0.content.num_bytes",
    }


def test_two_recipes_with_files_of_one_name_differ_by_what_is_in_them(files):
    folder = files(starter__chat="1234", joiner__chat="123")
    ours, theirs = (agreement(of_file(folder / who / "chat.jsonl")) for who in ("joiner", "starter"))
    found = {path: (our, their) for path, our, their in differences(ours, theirs)}
    assert found["data.datasets.0.content.num_bytes"] == (3, 4)
    assert "data.datasets.0.path" not in found
    hub = agreement(recipe_with("data.datasets.0.path=owner/data"))
    assert ("data.datasets.0.path", "owner/data", "local:chat.jsonl") in differences(hub, theirs)


def test_files_on_the_hub_are_no_copy_of_the_starters(files):
    sent = to_wire(of_file(files(starter__chat="1234") / "starter/chat.jsonl"))
    with pytest.raises(
        RecipeMismatch, match="'owner/data' is not what the run trains on: it has no local files"
    ):
        read_contents(from_wire(sent, ["data.datasets.0.path=owner/data"]))


PLACES = [
    *("/etc/passwd", "../secrets", "~/mail", "a/b/c", "./x", "mail.txt", "*.csv", "C:\\Users", "owner/.."),
    *("file:///etc/passwd", "https://example.org/x", "zip://a::b", "local:../../etc/passwd", "local:"),
    *("local:a\x1b[2J", "json", "", "Documents"),
]


def put(sent, value, *place):
    """Put something into the shared part of what a swarm published."""
    *sections, key = place
    at = sent["shared"]
    for section in sections:
        at = at[section]
    at[key] = value
    return sent


@pytest.mark.parametrize("path", PLACES)
def test_a_stranger_cannot_name_a_place_on_this_machine(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Documents").mkdir()
    for place in (
        ("model", "model_name_or_path"),
        ("model", "tokenizer_name_or_path"),
        ("data", "datasets", 0, "path"),
    ):
        (finding,) = refusal_of(put(wire(), path, *place)).findings
        assert finding.path == dotted(place) and "names a place on this machine" in finding.message


@pytest.mark.parametrize("files", ["/etc/passwd", ["ok.txt", "../x"], "https://example.org/x", "a/../../x"])
def test_a_stranger_cannot_reach_out_through_data_files(files):
    sent = put(wire(), files, "data", "datasets", 0, "data_files")
    assert "names a place" in refusal_of(sent).findings[0].message


TEMPLATE = "{%- for message in messages[::-1] %}{{ 'https://x /etc ../' }}\n{%- endfor %}"


@pytest.mark.parametrize("template", ["/etc/passwd", "chat.jinja", "../chat.j2", "~/x.jinja", "chatml", ""])
def test_a_stranger_cannot_have_a_chat_template_read_from_a_file(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ secret }}")
    sent = put(wire(*OF_TASK["sft"]), template, "data", "chat_template")
    assert [finding.path for finding in refusal_of(sent).findings] == ["data.chat_template"]


def test_words_may_look_like_places_where_nothing_is_looked_up():
    labels = ["/r/python", "~", "a::b", "local:x", "../up"]
    sent = wire(*OF_TASK["seq-cls"], f"seq_cls.labels={json.dumps(labels)}")
    arrived = from_wire(put(sent, {"/home": "text", "a::b": "label"}, "data", "datasets", 0, "columns"))
    assert arrived.seq_cls.labels == labels
    assert arrived.data.datasets[0].columns == {"/home": "text", "a::b": "label"}
    sent = wire(*OF_TASK["sft"], f"data.chat_template={json.dumps(TEMPLATE)}")
    assert from_wire(sent).data.chat_template == TEMPLATE


CONTENT = {"sha256": "0" * 64, "num_files": 1, "num_bytes": 1, "readers": ["json"]}
CONTENT_AT = ("data", "datasets", 0, "content")
WRONG = {"sha256": "../etc", "num_bytes": -1, "readers": ["pickle"]}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("seq_cls", "labels"), labels) for labels in (["x"], ["x", "x"], ["x", ""], ["x"] * 3_000)),
        (("data", "chat_template"), "{" * 200_000),
        (("data", "datasets", 0, "columns"), {"a": "text", "b": "text"}),
        (("data", "datasets", 0, "columns"), {"a": ["text"]}),
        (CONTENT_AT, {"sha256": "0" * 64}),
        *((CONTENT_AT, CONTENT | {name: wrong}) for name, wrong in WRONG.items()),
        (("quantization",), {"load_in_4bit": True, "load_in_8bit": True}),
        (("quantization",), {"load_in_4bit": True, "bnb_4bit_quant_storage": "float64"}),
        (("quantization",), {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}),
        (("quantization",), {"load_in_4bit": True, "llm_int8_skip_modules": [["x"]]}),
        (("swarm", "solo"), "after " + "9" * 400 + " seconds"),
        (("swarm", "norm_limit"), 0.5),
        (("swarm", "robust_mean"), 1),
        (("peft", "target_modules"), "(a+)+$"),
    ],
)
def test_what_a_stranger_says_about_data_and_weights_is_bounded(place, value):
    assert refusal_of(put(wire(*OF_TASK["seq-cls"], "peft.r=4"), value, *place)).findings
    layers = put(wire("peft.r=4"), ["q_proj"], "peft", "target_modules")
    assert from_wire(layers).peft.target_modules == ["q_proj"], "names of layers are no pattern"


def test_what_is_asked_to_be_brought_survives_a_content_that_makes_no_sense(files):
    sent = to_wire(of_file(files(starter__chat="1") / "starter/chat.jsonl"))
    for content in (None, 5, [], {}, {"num_files": "many", "num_bytes": {}}, {"num_files": True}):
        assert "bring a copy" in refusal_of(put(sent, content, *CONTENT_AT)).hint


def test_a_stranger_cannot_hide_in_a_free_section():
    sent = to_wire(recipe_with("model.config.deep=[[{x: /etc}]]"))
    assert refusal_of(sent).findings[0].path == "model.config.deep.0.0.x"
    for key in ("auto_map", "trust_remote_code"):
        sent = to_wire(recipe_with(f"model.config.{key}=true"))
        assert "would run code" in refusal_of(sent).findings[0].message
    sent = put(wire(), True, "model", "trust_remote_code")
    assert refusal_of(sent).findings[0].path == "model.trust_remote_code"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("dht", "host_maddrs", ["/ip4/0.0.0.0/tcp/1"]),
        ("dht", "use_relay", False),
        ("opt", "averager_opts", {"x": 1}),
        ("opt", "verbose", True),
    ],
)
def test_a_stranger_cannot_set_what_is_this_peers_own(section, key, value):
    sent = wire()
    sent["shared"]["hivemind_config"].setdefault(section, {})[key] = value
    assert "this peer's own choice" in refusal_of(sent).findings[0].message
    sent = wire()
    sent["suggested"]["hivemind_config"].setdefault(section, {})[key] = value
    assert "not something that a swarm may suggest" in refusal_of(sent).findings[0].message


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
        *(None, [], "recipe", {}, {"v": 1, "shared": {}}),
        *(of_form({}), of_form([]), of_form({}, v=2), of_form({}, v=True), of_form({}, more=1)),
        *(of_form({1: 2}), of_form({"x": b"bytes"}), of_form({"x": float("nan")}), of_form({"x": 10**400})),
        *(of_form({"x": "\ud800"}), of_form({"x": "y" * 100_000}), of_form({"x": [0] * 10_000})),
        of_form(nested(5_000)),
        of_form({"training": 5, "data": [], "model": None}),
        of_form({"training": 5}, {"training": {"save_steps": 5}}),
    ],
)
def test_whatever_a_stranger_sends_is_refused_as_a_recipe_error(obj):
    assert refusal_of(obj).findings


def places(data, place=()):
    for key, value in (
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield (*place, key)
        yield from places(value, (*place, key))


@pytest.mark.parametrize(
    "junk", [None, 5, -1.5, "x", [], {}, [[{}]], {"a": 1}, True, "local:x", 10**18], ids=repr
)
def test_junk_anywhere_is_either_a_recipe_or_a_recipe_error(junk):
    sent = wire()
    for place in places(sent["shared"]):
        broken = put(copy.deepcopy(sent), junk, *place)
        try:
            arrived = from_wire(broken)
        except RecipeError as error:
            assert error.findings
        else:
            assert fingerprint(agreement(arrived))


def test_extra_keys_and_wrong_types_get_the_schemas_findings():
    sent = wire()
    sent["shared"]["training"]["max_steps"] = "many"
    sent["shared"]["extra"] = 1
    assert {finding.path for finding in refusal_of(sent).findings} == {"training.max_steps", "extra"}
