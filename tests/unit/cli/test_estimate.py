"""`init --dry-run` and `check --deep`: what a run will cost, said before it starts."""

import json
import re

import datasets
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
GPU_LIKE = {"peft": {"r": 4}, "training": {"max_steps": 10, "optim": "paged_adamw_8bit"}}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write a recipe and its rows of 20 tokens: `recipe(peft={"r": 4})` changes it; gives the file's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "nineteen characters"}) + "\n") * 16)

    def write(**changes):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | changes))
        return "tiny.yaml"

    return write


def test_a_dry_run_tells_bytes_by_purpose_and_seconds_by_speed(recipe, trahiv):
    code, out, _ = trahiv("init", recipe(), "--dry-run", "--format", "json")
    (event,) = map(json.loads, out.splitlines())
    assert (code, event["event"]) == (0, "estimate")
    needed = estimate(load_recipe("tiny.yaml").recipe, length=20)
    assert event["longest_sample"] == 20
    assert event["activation_bytes"] == needed.activation_bytes
    assert event["total_bytes"] == needed.total_bytes < event["free_host_bytes"]
    assert event["free_device_bytes"] is None
    assert event["traffic"]["gradient_bytes"] == 4 * needed.num_trainable
    assert list(event["seconds"]["round_of_2"]) == ["5", "20", "100", "1000"]
    assert all(isinstance(value, int) for name, value in event.items() if name.endswith("_bytes") and value)


def test_a_deep_check_tells_the_same_after_what_every_check_tells(recipe, trahiv):
    code, out, _ = trahiv("check", recipe(), "--deep", "--format", "json")
    checked, told = map(json.loads, out.splitlines())
    assert (code, checked["event"], told["event"]) == (0, "checked", "estimate")
    assert told["total_bytes"] == estimate(load_recipe("tiny.yaml").recipe, length=20).total_bytes


def test_a_dry_run_is_told_to_a_log_in_lines(recipe, trahiv):
    code, out, err = trahiv("init", recipe(), "--dry-run", "--format", "plain")
    assert code == 0
    assert re.search(r"^trained weights +[\d.]+ KiB  [\d.]+k, float32$", out, re.MULTILINE)
    assert re.search(r"^activations +[\d.]+ .iB  4 x 20 tokens$", out, re.MULTILINE)
    assert re.search(r"^free here +[\d.]+ GiB$", out, re.MULTILINE)
    assert "fingerprint" in err  # the short summary


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("overlap", ["a step, 2 peers", "a step, many peers", "to join"]),
        ("diloco", ["50 steps, 2 peers", "50 steps, many peers", "to join"]),
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers", "to join"]),
        (
            "auto",
            ["float16, 2 peers", "float16, many", "uniform8, many", "blockwise4, many", "a fragment, many"]
            + ["to join", "mode auto takes the first that is through within a step; fragments, if none is"],
        ),
    ],
)
def test_what_a_mode_takes_is_told(recipe, trahiv, mode, rows):
    code, out, _ = trahiv("init", recipe(swarm={"mode": mode}), "--dry-run", "--format", "plain")
    assert code == 0
    assert re.search(rf"^mode {mode} +[\d.]+ .iB  copies", out, re.MULTILINE)
    traffic = out.partition("\ntraffic")[2].splitlines()[1:]
    assert [re.split(r" {2,}", line)[0] for line in traffic] == rows


def test_mode_auto_tells_programs_what_it_may_choose(recipe, trahiv):
    _, out, _ = trahiv("init", recipe(swarm={}), "--dry-run", "--format", "json")
    event = json.loads(out)
    assert event["mode"] == "auto"
    assert list(event["traffic"]["by_choice"]) == ["float16", "uniform8", "blockwise4", "a fragment"]
    assert event["seconds"]["blockwise4"]["5"] < event["seconds"]["float16"]["5"]


def test_a_dry_run_is_drawn_for_a_person_and_fits_80_columns(recipe, trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trahiv("init", recipe(**GPU_LIKE), "--dry-run", "--format", "human")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("libraries" in line and "█" in line for line in lines)
    assert "1000 Mbit/s" in out and "\x1b" not in out


def test_mode_auto_fits_80_columns_too(recipe, trahiv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = trahiv("init", recipe(swarm={}), "--dry-run", "--format", "human")
    assert max(map(len, out.splitlines())) <= 80
    assert "1000 Mbit/s" in out and "mode auto takes the first that is through within a step" in out


def test_a_gpu_has_a_column_of_its_own(recipe, trahiv, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    code, out, _ = trahiv("init", recipe(**GPU_LIKE), "--dry-run", "--format", "plain")
    assert code == 0
    assert re.match(r"memory +GPU +RAM\n", out)
    assert re.search(r"^optimizer state +[\d.]+ KiB +-  paged_adamw_8bit$", out, re.MULTILINE)
    assert re.search(r"^libraries +- +[\d.]+ MiB", out, re.MULTILINE)
    assert re.search(r"^free here +16.0 GiB +[\d.]+ GiB$", out, re.MULTILINE)


def test_what_does_not_fit_is_shown_and_then_refused(recipe, trahiv, monkeypatch):
    monkeypatch.setattr("trahiv_cli.assets.model.free_ram_bytes", lambda: 2**20)
    code, out, err = trahiv("init", recipe(), "--dry-run", "--format", "plain")
    assert code == 6
    assert "at the peak" in out
    assert re.search(
        r"error: Training would not fit into the RAM: .* MiB are needed, and 1.0 MiB are free", err
    )
    assert "LoRA" in err


def test_data_that_training_would_stop_at_stops_a_dry_run(recipe, trahiv):
    file = recipe(clm={"dataset_text_field": "body"})
    code, out, err = trahiv("init", file, "--dry-run", "--format", "plain")
    assert (code, out) == (2, "")
    assert "'body'" in err


def test_a_dry_run_starts_no_network_and_writes_no_run(recipe, trahiv, tmp_path, monkeypatch):
    monkeypatch.setattr("hivemind.DHT.__init__", lambda *_, **__: pytest.fail("a DHT was made"))
    assert trahiv("init", recipe(), "--dry-run")[0] == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0.0 KiB"),
        (512, "0.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**20 * 99.96, "100 MiB"),
        (2**30 * 7.25, "7.2 GiB"),
    ],
)
def test_sizes_have_a_unit_that_fits(num_bytes, words):
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.4, "9.4 s"), (9.6, "10 s"), (119, "119 s"), (120, "2.0 min"), (7200, "2.0 h")],
)
def test_times_have_a_unit_that_fits(seconds, words):
    assert duration(seconds) == words
