"""`init --dry-run` and `check --deep`: what a run will cost, said before it starts."""

import json
import re

import pytest
import torch
import yaml

from tests.kit.recipes import tiny_llama
from trahiv_cli.assets.model import estimate
from trahiv_cli.cli.estimate import duration, size
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


@pytest.mark.parametrize("how", ["plain", "human"])
def test_a_dry_run_is_drawn(drawn, how):
    text = "\n".join(drawn(how))
    assert re.search(r"^trained weights +[\d.]+ KiB +[█▏▎▍▌▋▊▉]+ +[\d.]+k, float32$", text, re.MULTILINE)
    assert re.search(r"^activations +[\d.]+ .iB .* 4 x 20 tokens$", text, re.MULTILINE)
    assert re.search(r"^libraries .*█", text, re.MULTILINE)
    assert re.search(r"^free here +[\d.]+ GiB$", text, re.MULTILINE)


OF_AUTO = "auto takes the first that is through within a step; fragments, if none is"


@pytest.mark.parametrize(
    ("mode", "traffic"),
    [
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers", "to join"]),
        (
            "auto",
            ["float16, 2 peers", "float16, many", "uniform8, many", "blockwise4, many", "a fragment, many"]
            + ["to join", OF_AUTO],
        ),
    ],
)
def test_what_a_mode_takes_is_told(drawn, mode, traffic):
    lines = drawn(swarm={"mode": mode})
    assert any(re.match(rf"mode {mode} +[\d.]+ .iB .* copies", line) for line in lines)
    speeds = next(index for index, line in enumerate(lines) if "1000 Mbit/s" in line)
    assert [re.split(r" {2,}", line)[0] for line in lines[speeds + 1 :] if line] == traffic


def test_a_gpu_has_a_column_of_its_own(drawn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    text = "\n".join(drawn(peft={"r": 4}, training={"max_steps": 10, "optim": "paged_adamw_8bit"}))
    assert re.search(r"^GPU +RAM$", text, re.MULTILINE)
    assert re.search(r"^optimizer state +[\d.]+ KiB +- .* paged_adamw_8bit$", text, re.MULTILINE)
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
    times = {0.04: "0.0 s", 9.6: "10 s", 119: "119 s", 120: "2.0 min", 7200: "2.0 h"}
    assert [duration(seconds) for seconds in times] == list(times.values())
