"""The agreement that peers share, its hash, and the part of local data in it."""

import copy
import json
import re

import pytest

from tests.unit.recipe.conftest import LOADED, of_file, quickstart
from trahiv_cli.recipe.agreement import (
    agreement,
    canonical,
    differences,
    fingerprint,
    resolve,
    run_id,
    what_changed,
)
from trahiv_cli.recipe.document import Document, dotted, leaves
from trahiv_cli.recipe.record import to_wire
from trahiv_cli.recipe.schema import TASK_SECTIONS, sections_of_a_recipe

OWNED = """
model.attn_implementation quantization.bnb_4bit_compute_dtype data.streaming data.num_proc
training.per_device_train_batch_size training.per_device_eval_batch_size training.gradient_accumulation_steps
training.bf16 training.fp16 training.activation_checkpointing training.torch_compile training.logging_steps
training.eval_steps training.save_steps training.save_total_limit training.dataloader_num_workers
training.report_to training.run_name training.trackio_space_id
hivemind_config.opt.averaging_timeout hivemind_config.opt.allreduce_timeout
hivemind_config.opt.next_chunk_timeout hivemind_config.opt.load_state_timeout
hivemind_config.opt.offload_optimizer hivemind_config.opt.client_mode
hivemind_config.opt.tracker_opts hivemind_config.opt.performance_ema_alpha
hivemind_config.opt.shutdown_timeout hivemind_config.opt.verbose swarm.public swarm.relay
swarm.save_minutes
""".split()
"""Fields that each peer decides for itself, beside those of `hivemind_config.dht`."""

FIELDS = {(*place, name) for place, fields in sections_of_a_recipe().items() for name in fields}
FIELDS -= {place[:end] for place in sections_of_a_recipe() for end in range(len(place) + 1)}
SHARED = {dotted(field) for field in FIELDS if "dht" not in field}.difference(OWNED)


@pytest.fixture(params=TASK_SECTIONS)
def task(request):
    return request.param


@pytest.fixture
def shared(task, put):
    """An agreement with every field of its task."""
    file = put({"chat.jsonl": "{}"}) / "chat.jsonl"
    labels = ["seq_cls.labels=[no, yes]"] * (task == "seq-cls")
    more = ("peft.r=4", "quantization.load_in_4bit=true", *LOADED, "clm=", f"task={task}", *labels)
    return agreement(of_file(file, *more))


def test_agreement_has_exactly_shared_fields(task, shared):
    others = {section for other, section in TASK_SECTIONS.items() if other != task}
    held = {dotted(location) for location, _ in leaves(shared)}
    assert held == {path for path in SHARED if path.partition(".")[0] not in others}


QUANTIZED = ("peft={r: 4, lora_alpha: 32}", "quantization.load_in_4bit=true", "training.weight_decay=0")


@pytest.mark.parametrize(
    "override",
    [
        "hivemind_config.dht.client_mode=true",
        "quantization.bnb_4bit_compute_dtype=float32",
        "swarm.solo=after 300.00 seconds",
        "peft={r: 4}",  # a default, of whatever type
        "training.weight_decay=0.0",
    ],
)
def test_own_and_equal_values_keep_fingerprint(override):
    one, other = (agreement(quickstart(*QUANTIZED, *LOADED, *more)) for more in ((), (override,)))
    assert fingerprint(one) == fingerprint(other)
    assert differences(one, other) == ()


def test_each_shared_value_changes_fingerprint(shared):
    before = fingerprint(shared)
    for location, _ in leaves(shared):
        other = Document(copy.deepcopy(shared), "")
        other.put(location, "another")
        assert fingerprint(other.data) != before, location


def test_fingerprint_is_stable():
    shared = {"b": [1.0, 0.0002, "\u00e9"], "a": None}
    assert canonical(shared) == b'{"a":null,"b":[1,0.0002,"\xc3\xa9"]}'
    assert fingerprint(shared) == "3d5a659ffb6d081bb85e2364bff7bb4a918017f04577889e339cd7885ba648f6"


def test_run_id_has_name_and_hash():
    assert re.fullmatch("quickstart-[0-9a-f]{8}", run_id(quickstart()))
    assert run_id(quickstart()) != run_id(quickstart("training.seed=43"))
    assert len(run_id(quickstart(f"name={'n' * 48}"))) == 48


def test_resolving_keeps_agreement():
    recipe = quickstart("data.datasets.0.path=owner/data")
    resolved = resolve(recipe)
    assert resolved.hivemind_config.opt.run_id == run_id(recipe)
    assert agreement(resolved) == agreement(recipe)
    assert resolve(resolved) == resolved


def test_differences_are_per_leaf():
    ours, theirs = {"a": 1, "b": {"c": 2, "d": 3.0}}, {"a": True, "b": {"d": 3, "e": [4]}}
    assert differences(ours, theirs) == (("a", 1, True), ("b.c", 2, None), ("b.e", None, [4]))


def test_local_paths_never_travel(put):
    put({"owner/model/config.json": "{}"})
    recipe = quickstart(
        "data.datasets=[{path: /home/me/secret/chat.jsonl}, {path: ~/data, data_files: [secret/b.txt]}, "
        "{path: 'data/*.csv'}, {path: chat.jsonl}, {path: owner/data, data_files: x/y.parquet}]",
        "model={model_name_or_path: owner/model}",
    )
    shared = agreement(recipe)
    names = ["local:chat.jsonl", "local:data", "local:*.csv", "local:chat.jsonl", "owner/data"]
    assert [dataset["path"] for dataset in shared["data"]["datasets"]] == names
    assert shared["data"]["datasets"][4]["data_files"] == "x/y.parquet"
    assert shared["model"]["model_name_or_path"] == "local:model"
    assert "secret" not in json.dumps(to_wire(recipe))


@pytest.mark.parametrize(
    ("file", "text", "overrides", "changes"),
    [
        ("chat", "1234", ["training.max_steps=9"], ([], [])),
        ("chat", "12356", ["training.max_steps=9"], ([], ["chat.jsonl"])),
        ("chat", "1235", ["training.seed=5"], (["training.seed"], ["chat.jsonl"])),
        ("other", "1235", [], (["data.datasets.0.content.sha256"], [])),
        ("chat", "1234", ["hivemind_config.opt.run_id=x"], (["hivemind_config.opt.run_id"], [])),
    ],
)
def test_changed_data_and_fields_are_distinguished(put, file, text, overrides, changes):
    folder = put({"before/chat.jsonl": "1234", f"after/{file}.jsonl": text})
    earlier = of_file(folder / "before/chat.jsonl")
    assert what_changed(earlier, of_file(folder / f"after/{file}.jsonl", *overrides)) == changes
