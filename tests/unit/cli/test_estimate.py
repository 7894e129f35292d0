"""`init --dry-run` and `check --deep`: what a run will cost, said before it starts."""

import json
import re

import pytest
import torch
import yaml
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.compression import CompressionInfo

from tests.kit.recipes import tiny_llama
from tests.unit.assets.conftest import LORA, recipe
from trahiv_cli.assets.model import estimate, require_memory
from trahiv_cli.cli.estimate import TIME_UNITS, encoded_bytes, size, traffic_of
from trahiv_cli.optim.auto import CODECS_BY_LOSS
from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.recipe.load import load_recipe

torch.set_num_threads(1)

RECIPE = {
    "name": "tiny",
    "model": {"config": tiny_llama(), "tokenizer_name_or_path": "builtin/bytes"},
    "data": {"datasets": [{"path": "rows.jsonl"}]},
    "clm": {"max_length": 64, "packing": False},
    "training": {"max_steps": 10, "per_device_train_batch_size": 4},
    "hivemind_config": {"opt": {"target_batch_size": 16}},
    "swarm": {"mode": "sync"},
}
DRY_RUN = ("init", "tiny.yaml", "--dry-run")


@pytest.fixture
def write(nothing_starts, here, monkeypatch):
    """Write a recipe and its rows of 20 tokens: `write(peft={"r": 4})` changes it."""
    monkeypatch.setenv("COLUMNS", "80")
    (here / "rows.jsonl").write_text((json.dumps({"text": "nineteen characters"}) + "\n") * 16)

    def write(**changes):
        (here / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | changes))

    write()
    return write


@pytest.fixture
def drawn(write, trahiv):
    """`drawn(peft={"r": 4})` gives the lines of a dry run's picture, without its frame."""

    def drawn(how="plain", **changes):
        write(**changes)
        code, out, _ = trahiv(*DRY_RUN, "--format", how)
        assert (code, {len(line) for line in out.splitlines()}, "\x1b" in out) == (0, {80}, False)
        return [line.strip("│╭╮╰╯─ ") for line in out.splitlines()]

    return drawn


def test_programs_get_bytes_by_purpose_and_seconds_by_speed(write, trahiv, here):
    code, out, err = trahiv(*DRY_RUN, "--format", "json")
    (event,) = map(json.loads, out.splitlines())
    assert (code, event["event"]) == (0, "estimate")
    assert "fingerprint" in err and not (here / "runs").exists(), "the short summary, and nothing else"
    needed = estimate(load_recipe("tiny.yaml").recipe, length=20)
    assert (event["longest_sample"], event["free_device_bytes"]) == (20, None)
    assert event["activation_bytes"] == needed.activation_bytes
    assert event["total_bytes"] == needed.total_bytes < event["free_host_bytes"]
    assert event["traffic"]["gradient_bytes"] == 4 * needed.num_trainable
    assert list(event["seconds"]["round_of_2"]) == ["5", "20", "100", "1000"]
    assert all(isinstance(value, int) for name, value in event.items() if name.endswith("_bytes") and value)
    write(swarm={})
    code, out, _ = trahiv("check", "tiny.yaml", "--deep", "--format", "json")
    checked, event = map(json.loads, out.splitlines())
    assert (code, checked["event"], event["event"], event["mode"]) == (0, "checked", "estimate", "auto")
    assert list(event["traffic"]["by_choice"]) == ["float16", "uniform8", "blockwise4", "a fragment"]
    assert event["seconds"]["blockwise4"]["5"] < event["seconds"]["float16"]["5"]


@pytest.mark.parametrize(
    ("mode", "traffic"),
    [
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers"]),
        (
            "auto",
            ["a step, 2 peers", "a step, many peers"]
            + ["float16, many", "uniform8, many", "blockwise4, many", "a fragment, many"],
        ),
    ],
)
def test_a_dry_run_is_drawn_as_a_mode_takes_it(drawn, mode, traffic):
    lines = drawn("human", swarm={"mode": mode})
    text = "\n".join(lines)
    assert re.search(r"^trained weights +[\d.]+ KiB +[\d.]+k, float32$", text, re.MULTILINE)
    assert re.search(r"^activations +[\d.]+ .iB .* 4 x 20 tokens$", text, re.MULTILINE)
    assert re.search(rf"^mode {mode} +[\d.]+ .iB .* copies", text, re.MULTILINE)
    assert re.search(r"^free here +[\d.]+ GiB$", text, re.MULTILINE)
    speeds = next(index for index, line in enumerate(lines) if "1000 Mbit/s" in line)
    told = [re.split(r" {2,}", line)[0] for line in lines[speeds + 1 :] if line]
    assert told == [*traffic, "to join"]


def test_a_gpu_has_a_column_of_its_own(drawn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    text = "\n".join(drawn(peft={"r": 4}, training={"max_steps": 10, "optim": "paged_adamw_8bit"}))
    assert re.search(r"^GPU +RAM$", text, re.MULTILINE)
    assert re.search(r"^optimizer state +[\d.]+ KiB +- +paged_adamw_8bit$", text, re.MULTILINE)
    assert re.search(r"^libraries +- +[\d.]+ MiB", text, re.MULTILINE)
    assert re.search(r"^free here +16.0 GiB +[\d.]+ GiB$", text, re.MULTILINE)


def test_what_does_not_fit_is_shown_and_then_refused(write, trahiv, monkeypatch):
    monkeypatch.setattr("trahiv_cli.assets.model.free_bytes", lambda: {"RAM": 2**20})
    code, out, err = trahiv(*DRY_RUN, "--format", "plain")
    assert (code, "at the peak" in out, "LoRA" in err) == (6, True, True)
    assert re.search("error: Training would not fit into the RAM: .* are needed, and 1.0 MiB are free", err)


def test_sizes_and_times_have_a_unit_that_fits():
    sizes = {0: "0.0 KiB", 512: "0.5 KiB", int(2**20 * 99.96): "100 MiB", int(2**30 * 7.25): "7.2 GiB"}
    assert [size(num_bytes) for num_bytes in sizes] == list(sizes.values())
    times = {0.04: "0.0 s", 9.6: "9.6 s", 119: "2.0 min", 7200: "2.0 h", 10**7: "116 days"}
    assert [size(seconds, TIME_UNITS) for seconds in times] == list(times.values())


# -- traffic --------------------------------------------------------------------------------------


def sent_by(**sections):
    """The traffic of a recipe, and what is known of its memory."""
    wanted = recipe(**sections)
    needed = require_memory(wanted)
    return traffic_of(wanted, needed), needed


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_tensors_are_as_long_as_hivemind_makes_them(codec):
    tensors = [torch.randn(shape) for shape in ((300, 1000), (700, 1000), (64,))]
    make = CODECS[codec]()
    ratio = make.estimate_compression_ratio(CompressionInfo.from_tensor(tensors[0]))
    parts = [part for one in tensors for part in one.view(-1).split(int(DEFAULT_PART_SIZE_BYTES / 4 / ratio))]
    length = sum(len(make.compress(one, CompressionInfo.from_tensor(one)).buffer) for one in parts)
    assert encoded_bytes(tuple(tensor.numel() for tensor in tensors), codec) == length


@pytest.mark.parametrize(
    ("mode", "steps", "fragments", "copies_to_join"),
    [("sync", 1, 1, 3), ("auto", 1, 1, 4), ("diloco", 50, 1, 2.5), ("streaming", 13, 4, 2.5)],
)
def test_modes_with_local_steps_exchange_less_and_give_a_joiner_more(mode, steps, fragments, copies_to_join):
    """With local steps it gets momentum, too, and statistics in 8 bits."""
    traffic, needed = sent_by(swarm={"mode": mode}, hivemind_config={"opt": {"grad_compression": "none"}})
    assert (traffic.steps_per_round, traffic.num_fragments) == (steps, fragments)
    sizes = traffic.sent()
    sent = [fragments * sizes[name] / needed.trainable_bytes for name in ("round_of_2", "round_of_many")]
    assert sent == pytest.approx([1, 2], abs=1e-4), "many peers send it almost twice"
    assert traffic.state_bytes / needed.trainable_bytes == pytest.approx(copies_to_join, abs=0.05)


def test_what_auto_chooses_from_is_told():
    traffic, _ = sent_by()
    sizes = traffic.sent()
    many = [sizes[name] for name in (*CODECS_BY_LOSS, "a fragment")]
    assert sorted(many, reverse=True) == many
    assert sizes["float16"] == sizes["round_of_many"]
    named, _ = sent_by(hivemind_config={"opt": {"grad_compression": "blockwise8"}})
    assert list(named.by_choice) == ["blockwise8", "a fragment"]


def test_only_what_is_trained_travels():
    opt = {"opt": {"grad_compression": "float16", "load_state_compression": "float16"}}
    how = {"swarm": {"mode": "overlap"}, "training": {"optim": "adamw_8bit"}}
    traffic, needed = sent_by(peft=LORA, hivemind_config=opt, **how)
    assert 2 * needed.num_trainable < traffic.gradient_bytes < 2.02 * needed.num_trainable < needed.num_frozen
    assert traffic.state_bytes == traffic.gradient_bytes + needed.optimizer_bytes
