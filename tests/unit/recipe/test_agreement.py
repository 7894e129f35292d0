"""What peers share, how it is hashed, and what happens to what a stranger sends."""

import copy
import json

import pytest

from trahiv_cli.errors import RecipeError
from trahiv_cli.recipe.agreement import (
    agreement,
    canonical,
    differences,
    fingerprint,
    from_wire,
    resolve,
    run_id,
    to_wire,
)
from trahiv_cli.recipe.document import dotted, leaves
from trahiv_cli.recipe.load import builtin_recipes, load_recipe
from trahiv_cli.recipe.ownership import OWN, SUGGESTED, is_own
from trahiv_cli.recipe.suggest import sections_of_a_recipe

SHARED = """
version name task
model.model_name_or_path model.config model.revision model.tokenizer_name_or_path
peft.r peft.lora_alpha peft.lora_dropout peft.target_modules peft.modules_to_save
peft.use_rslora peft.use_dora
data.datasets.0.path data.datasets.0.name data.datasets.0.split data.datasets.0.revision
data.datasets.0.data_files data.eval.test_split_size data.shuffle
clm.dataset_text_field clm.max_length clm.packing
training.max_steps training.learning_rate training.lr_scheduler_type training.lr_scheduler_kwargs
training.warmup_steps training.optim training.optim_args training.weight_decay training.adam_beta1
training.adam_beta2 training.adam_epsilon training.max_grad_norm training.seed
hivemind_config.opt.run_id hivemind_config.opt.target_batch_size hivemind_config.opt.matchmaking_time
hivemind_config.opt.average_state_every hivemind_config.opt.grad_compression
hivemind_config.opt.state_averaging_compression hivemind_config.opt.load_state_compression
swarm.mode
""".split()


def recipe_with(*overrides):
    return load_recipe("quickstart", overrides).recipe


def wire():
    return copy.deepcopy(to_wire(recipe_with("model.config=", "model.model_name_or_path=owner/model")))


def refusal_of(obj, overrides=()):
    with pytest.raises(RecipeError) as caught:
        from_wire(obj, overrides)
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
    assert {dotted(field) for field in fields if not is_own(dotted(field))} == set(SHARED)
    assert {path for path in OWN if path != "hivemind_config.dht"} <= {dotted(field) for field in fields}
    assert all(is_own(path) for path in SUGGESTED)


def test_the_agreement_holds_exactly_the_shared_fields():
    recipe = recipe_with("peft.r=4", "model.config=", "model.model_name_or_path=a/b")
    assert {dotted(location) for location, _ in leaves(agreement(recipe))} == set(SHARED)


@pytest.mark.parametrize(
    "own",
    ["training.per_device_train_batch_size=4", "hivemind_config.dht.client_mode=true", "model.dtype=float32"],
)
def test_own_choices_leave_the_fingerprint_alone(own):
    assert fingerprint(agreement(recipe_with(own))) == fingerprint(agreement(recipe_with()))


@pytest.mark.parametrize("shared", ["training.seed=43", "swarm={}", "name=other", "clm.packing=false"])
def test_shared_values_change_the_fingerprint_unless_they_are_the_default(shared):
    same = fingerprint(agreement(recipe_with(shared))) == fingerprint(agreement(recipe_with()))
    assert same is (shared == "swarm={}")


def test_the_fingerprint_of_a_known_agreement_never_changes():
    shared = {"b": [1.0, 0.0002, "\u00e9"], "a": None}
    assert canonical(shared) == b'{"a":null,"b":[1,0.0002,"\xc3\xa9"]}'
    assert fingerprint(shared) == "3d5a659ffb6d081bb85e2364bff7bb4a918017f04577889e339cd7885ba648f6"


def test_a_written_default_is_the_default_whatever_its_type():
    written = recipe_with("peft.lora_alpha=32", "peft.r=16", "training.weight_decay=0")
    assert agreement(written) == agreement(recipe_with("peft={}", "training.weight_decay=0.0"))
    assert canonical(agreement(written)) == canonical(
        agreement(recipe_with("peft={}", "training.weight_decay=0.0"))
    )


def test_run_id_is_given_or_made_of_the_name_and_the_agreement():
    recipe = recipe_with()
    assert run_id(recipe).startswith("quickstart-")
    assert len(run_id(recipe)) == len("quickstart-") + 8
    assert run_id(recipe_with("hivemind_config.opt.run_id=mine")) == "mine"
    assert len(run_id(recipe_with(f"name={'n' * 48}"))) == 48


def test_resolving_fills_in_the_run_id_and_changes_nothing_else():
    recipe = recipe_with()
    assert resolve(recipe).hivemind_config.opt.run_id == run_id(recipe)
    assert agreement(resolve(recipe)) == agreement(recipe)
    assert resolve(resolve(recipe)) == resolve(recipe)


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


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_recipe_survives_the_wire(name):
    recipe = load_recipe(name).recipe
    arrived = from_wire(json.loads(json.dumps(to_wire(recipe))))
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(recipe))
    assert arrived.hivemind_config.opt.run_id == run_id(recipe)


def test_suggestions_arrive_and_secrets_do_not():
    sent = recipe_with(
        "training.per_device_train_batch_size=3",
        "training.report_to=[wandb]",
        "hivemind_config.dht.identity_path=/home/me/key",
        "hivemind_config.opt.averaging_timeout=77",
    )
    arrived = from_wire(to_wire(sent))
    assert arrived.training.per_device_train_batch_size == 3
    assert arrived.hivemind_config.opt.averaging_timeout == 77
    assert arrived.training.report_to == []
    assert arrived.hivemind_config.dht.identity_path is None


def test_the_joiner_may_override_what_arrives():
    assert (
        from_wire(wire(), ["training.per_device_train_batch_size=1"]).training.per_device_train_batch_size
        == 1
    )


def test_a_local_file_of_the_starter_must_be_brought(tmp_path):
    recipe = recipe_with("data.datasets.0.path=/starter/chat.jsonl")
    error = refusal_of(to_wire(recipe))
    expected = (
        "the starter trains on its own file `chat.jsonl`: bring a copy and `--set data.datasets.0.path=FILE`"
    )
    assert error.hint == expected
    arrived = from_wire(to_wire(recipe), [f"data.datasets.0.path={tmp_path}/chat.jsonl"])
    assert fingerprint(agreement(arrived)) == fingerprint(agreement(recipe))


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../secrets",
        "~/mail",
        "a/b/c",
        "./x",
        "mail.txt",
        "*.csv",
        "C:\\Users",
        "file:///etc/passwd",
        "https://example.org/x",
        "zip://a::b",
        "owner/..",
        "local:../../etc/passwd",
        "local:",
        "local:a\x1b[2J",
        "json",
        "",
    ],
)
def test_a_stranger_cannot_name_a_place_on_this_machine(path):
    for section, key in (("model", "model_name_or_path"), ("model", "tokenizer_name_or_path")):
        sent = wire()
        sent["shared"][section][key] = path
        assert "names a place on this machine" in refusal_of(sent).findings[0].message
    sent = wire()
    sent["shared"]["data"]["datasets"][0]["path"] = path
    assert refusal_of(sent).findings[0].path == "data.datasets.0.path"


def test_a_stranger_cannot_name_a_folder_that_happens_to_be_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Documents").mkdir()
    sent = wire()
    sent["shared"]["data"]["datasets"][0]["path"] = "Documents"
    assert "names a place on this machine" in refusal_of(sent).findings[0].message


@pytest.mark.parametrize("files", ["/etc/passwd", ["ok.txt", "../x"], "https://example.org/x", "a/../../x"])
def test_a_stranger_cannot_reach_out_through_data_files(files):
    sent = wire()
    sent["shared"]["data"]["datasets"][0]["data_files"] = files
    assert "names a place" in refusal_of(sent).findings[0].message


def test_a_stranger_cannot_hide_in_a_free_section():
    sent = to_wire(recipe_with("model.config.deep=[[{x: /etc}]]"))
    assert refusal_of(sent).findings[0].path == "model.config.deep.0.0.x"
    for key in ("auto_map", "trust_remote_code"):
        sent = to_wire(recipe_with(f"model.config.{key}=true"))
        assert "would run code" in refusal_of(sent).findings[0].message
    sent = wire()
    sent["shared"]["model"]["trust_remote_code"] = True
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


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [],
        "recipe",
        {},
        {"v": 2, "shared": {}, "suggested": {}},
        {"v": True, "shared": {}, "suggested": {}},
        {"v": 1, "shared": [], "suggested": {}},
        {"v": 1, "shared": {}},
        {"v": 1, "shared": {}, "suggested": {}, "more": 1},
        {"v": 1, "shared": {}, "suggested": {}},
        {"v": 1, "shared": {1: 2}, "suggested": {}},
        {"v": 1, "shared": {"x": b"bytes"}, "suggested": {}},
        {"v": 1, "shared": {"x": float("nan")}, "suggested": {}},
        {"v": 1, "shared": {"x": 10**400}, "suggested": {}},
        {"v": 1, "shared": {"x": "\ud800"}, "suggested": {}},
        {"v": 1, "shared": {"x": "y" * 100_000}, "suggested": {}},
        {"v": 1, "shared": {"x": [0] * 10_000}, "suggested": {}},
        {"v": 1, "shared": nested(5_000), "suggested": {}},
        {"v": 1, "shared": {"training": 5, "data": [], "model": None}, "suggested": {}},
        {"v": 1, "shared": {"training": 5}, "suggested": {"training": {"save_steps": 5}}},
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
    for *sections, key in list(places(sent)):
        broken = copy.deepcopy(sent)
        at = broken
        for section in sections:
            at = at[section]
        at[key] = junk
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


def test_refusing_changes_nothing_of_what_was_sent():
    sent = wire()
    before = copy.deepcopy(sent)
    from_wire(sent)
    assert sent == before
