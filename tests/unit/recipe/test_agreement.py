"""The agreement that peers share, its hash, and the part of local data in it."""

import copy
import json
import re
from functools import reduce
from operator import getitem

import pytest

from tests.unit.recipe.conftest import LOADED, of_file, of_task, quickstart, run_of
from trahiv_cli.recipe.agreement import (
    AgreedRun,
    canonical,
    differences,
    fingerprint,
    resolve,
    what_changed,
)
from trahiv_cli.recipe.document import dotted, leaves
from trahiv_cli.recipe.record import to_wire
from trahiv_cli.recipe.schema import sections_of_a_recipe
from trahiv_cli.recipe.task_sections import TASK_SECTIONS

OWNED = """
model.attn_implementation quantization.bnb_4bit_compute_dtype data.streaming data.num_proc
training.per_device_train_batch_size training.per_device_eval_batch_size training.gradient_accumulation_steps
training.bf16 training.fp16 training.activation_checkpointing training.torch_compile training.logging_steps
training.use_liger_kernel
training.eval_steps training.save_steps training.save_total_limit training.dataloader_num_workers
training.report_to training.run_name training.trackio_space_id
hivemind_config.opt.averaging_timeout hivemind_config.opt.allreduce_timeout
hivemind_config.opt.next_chunk_timeout hivemind_config.opt.load_state_timeout
hivemind_config.opt.offload_optimizer hivemind_config.opt.client_mode
hivemind_config.opt.tracker_opts hivemind_config.opt.performance_ema_alpha
hivemind_config.opt.shutdown_timeout hivemind_config.opt.verbose swarm.public swarm.relay
swarm.save_minutes grpo.steps_per_generation grpo.use_vllm grpo.vllm_mode grpo.vllm_server_base_url
grpo.vllm_gpu_memory_utilization grpo.vllm_enable_sleep_mode
""".split()
"""Fields that each peer decides for itself, beside those of `hivemind_config.dht`."""

FIELDS = {(*place, name) for place, fields in sections_of_a_recipe().items() for name in fields}
FIELDS -= {place[:end] for place in sections_of_a_recipe() for end in range(len(place) + 1)}
SHARED = {dotted(field) for field in FIELDS if "dht" not in field}.difference(OWNED)


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_agreement_has_exactly_shared_fields(task, put):
    file = put({"chat.jsonl": "{}"}) / "chat.jsonl"
    run = of_file(file, "peft.r=4", "quantization.load_in_4bit=true", *LOADED, *of_task(task))
    others = {section for other, section in TASK_SECTIONS.items() if other != task}
    held = {dotted(location) for location, _ in leaves(run.agreement)}
    assert held == {path for path in SHARED if path.partition(".")[0] not in others}


QUANTIZED = ("peft={r: 4, lora_alpha: 32}", "quantization.load_in_4bit=true", "training.weight_decay=0")


@pytest.mark.parametrize(
    ("override", "is_same"),
    [
        ("hivemind_config.dht.client_mode=true", True),
        ("quantization.bnb_4bit_compute_dtype=float32", True),
        ("swarm.solo=after 300.00 seconds", True),
        ("peft={r: 4}", True),  # a default, of whatever type
        ("training.weight_decay=0.0", True),
        ("training.seed=43", False),
        ("swarm.norm_limit=0", False),
    ],
)
def test_only_shared_values_change_fingerprint(override, is_same):
    one, other = (run_of(*QUANTIZED, *LOADED, *more).agreement for more in ((), (override,)))
    assert (fingerprint(one) == fingerprint(other)) is is_same
    changed = set() if is_same else {override.partition("=")[0], "hivemind_config.opt.run_id"}
    assert {path for path, _, _ in differences(one, other)} == changed


@pytest.mark.parametrize("task", TASK_SECTIONS)
def test_each_shared_value_changes_fingerprint(task):
    shared = run_of("peft.r=4", "quantization.load_in_4bit=true", *LOADED, *of_task(task)).agreement
    before = fingerprint(shared)
    for location, value in leaves(shared):
        other = copy.deepcopy(shared)
        reduce(getitem, location[:-1], other)[location[-1]] = "another"
        assert value != "another"
        assert fingerprint(other) != before, location


def test_fingerprint_is_stable():
    shared = {"b": [1.0, 0.0002, "\u00e9"], "a": None}
    assert canonical(shared) == b'{"a":null,"b":[1,0.0002,"\xc3\xa9"]}'
    assert fingerprint(shared) == "3d5a659ffb6d081bb85e2364bff7bb4a918017f04577889e339cd7885ba648f6"


def test_run_id_is_given_or_derived():
    recipe = quickstart("data.datasets.0.path=owner/data")
    run = resolve(recipe)
    assert re.fullmatch("quickstart-.{8}", run.run_id)
    assert run_of("hivemind_config.opt.run_id=mine").run_id == "mine"
    assert len(run_of(f"name={'n' * 48}").run_id) == 48
    assert run.recipe.hivemind_config.opt.run_id == run.run_id
    assert AgreedRun.of(recipe) == resolve(run.recipe) == run


def test_fingerprint_of_recipe_is_pinned():
    """Peers of all versions of a protocol must compute it byte for byte alike."""
    more = ("data.datasets.0.path=owner/data", "peft.r=4", "swarm.mode=diloco")
    run = run_of(*LOADED, *more)
    assert run.run_id == "quickstart-60ffb66f"
    assert run.fingerprint == "c33dc73eee51dc3f8df6a2598ed41241a4bc10efbc3605b6a1f34ef5b537c90a"
    named = run_of(*LOADED, *more, "hivemind_config.opt.run_id=mine")
    assert named.fingerprint == "e09e438c20290b762472db70cb3f10bca82f377fc12f0ae980e3de2625456927"


def test_differences_are_per_leaf():
    ours, theirs = {"a": 1, "b": {"c": 2, "d": 3.0}}, {"a": True, "b": {"d": 3, "e": [4]}}
    assert differences(ours, theirs) == (("a", 1, True), ("b.c", 2, None), ("b.e", None, [4]))


def test_local_paths_never_travel(put):
    put({"owner/model/config.json": "{}"})
    run = run_of(
        "data.datasets=[{path: /home/me/secret/chat.jsonl}, {path: ~/data, data_files: [secret/b.txt]}, "
        "{path: 'data/*.csv'}, {path: chat.jsonl}, {path: owner/data, data_files: x/y.parquet}]",
        "model={model_name_or_path: owner/model}",
    )
    shared = run.agreement
    names = ["local:chat.jsonl", "local:data", "local:*.csv", "local:chat.jsonl", "owner/data"]
    assert [dataset["path"] for dataset in shared["data"]["datasets"]] == names
    assert shared["data"]["datasets"][4]["data_files"] == "x/y.parquet"
    assert shared["model"]["model_name_or_path"] == "local:model"
    assert "secret" not in json.dumps(to_wire(run))


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
