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
DRY_RUN = ("init", "tiny.yaml", "--dry-run", "--format")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a recipe and its rows of 20 tokens: `write(peft={"r": 4})` changes it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "nineteen characters"}) + "\n") * 16)

    def write(**changes):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE | changes))

    write()
    return write


@pytest.fixture
def lines(write, trahiv):
    """`lines(peft={"r": 4})` gives those of a dry run's picture, without its frame."""

    def lines(how="plain", **changes):
        write(**changes)
        code, out, _ = trahiv(*DRY_RUN, how)
        drawn = out.splitlines()
        assert (code, {len(line) for line in drawn}, "\x1b" in out) == (0, {80}, False)
        return [line.strip("│╭╮╰╯─ ") for line in drawn]

    return lines


def test_programs_get_bytes_by_purpose_and_seconds_by_speed(write, trahiv, tmp_path, monkeypatch):
    monkeypatch.setattr("hivemind.DHT.__init__", lambda *_, **__: pytest.fail("a DHT was made"))
    code, out, err = trahiv(*DRY_RUN, "json")
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
    assert "fingerprint" in err  # the short summary
    assert not (tmp_path / "runs").exists()
    write(swarm={})
    event = json.loads(trahiv(*DRY_RUN, "json")[1])
    assert event["mode"] == "auto"
    assert list(event["traffic"]["by_choice"]) == ["float16", "uniform8", "blockwise4", "a fragment"]
    assert event["seconds"]["blockwise4"]["5"] < event["seconds"]["float16"]["5"]


def test_a_deep_check_tells_the_same_after_what_every_check_tells(write, trahiv):
    code, out, _ = trahiv("check", "tiny.yaml", "--deep", "--format", "json")
    checked, told = map(json.loads, out.splitlines())
    assert (code, checked["event"], told["event"]) == (0, "checked", "estimate")
    assert told["total_bytes"] == estimate(load_recipe("tiny.yaml").recipe, length=20).total_bytes


@pytest.mark.parametrize("how", ["plain", "human"])
def test_a_dry_run_is_drawn(lines, how):
    drawn = "\n".join(lines(how))
    assert re.search(r"^trained weights +[\d.]+ KiB +[█▏▎▍▌▋▊▉]+ +[\d.]+k, float32$", drawn, re.MULTILINE)
    assert re.search(r"^activations +[\d.]+ .iB .* 4 x 20 tokens$", drawn, re.MULTILINE)
    assert re.search(r"^libraries .*█", drawn, re.MULTILINE)
    assert re.search(r"^free here +[\d.]+ GiB$", drawn, re.MULTILINE)


@pytest.mark.parametrize(
    ("mode", "traffic"),
    [
        ("overlap", ["a step, 2 peers", "a step, many peers", "to join"]),
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers", "to join"]),
        (
            "auto",
            ["float16, 2 peers", "float16, many", "uniform8, many", "blockwise4, many", "a fragment, many"]
            + ["to join", "auto takes the first that is through within a step; fragments, if none is"],
        ),
    ],
)
def test_what_a_mode_takes_is_told(lines, mode, traffic):
    drawn = lines(swarm={"mode": mode})
    assert any(re.match(rf"mode {mode} +[\d.]+ .iB .* copies", line) for line in drawn)
    speeds = next(index for index, line in enumerate(drawn) if "1000 Mbit/s" in line)
    assert [re.split(r" {2,}", line)[0] for line in drawn[speeds + 1 :] if line] == traffic


def test_a_gpu_has_a_column_of_its_own(lines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    peft = {"peft": {"r": 4}, "training": {"max_steps": 10, "optim": "paged_adamw_8bit"}}
    drawn = "\n".join(lines(**peft))
    assert re.search(r"^GPU +RAM$", drawn, re.MULTILINE)
    assert re.search(r"^optimizer state +[\d.]+ KiB +- .* paged_adamw_8bit$", drawn, re.MULTILINE)
    assert re.search(r"^libraries +- +[\d.]+ MiB", drawn, re.MULTILINE)
    assert re.search(r"^free here +16.0 GiB +[\d.]+ GiB$", drawn, re.MULTILINE)


def test_what_does_not_fit_is_shown_and_then_refused(write, trahiv, monkeypatch):
    monkeypatch.setattr("trahiv_cli.assets.model.free_bytes", lambda: {"RAM": 2**20})
    code, out, err = trahiv(*DRY_RUN, "plain")
    assert (code, "at the peak" in out, "LoRA" in err) == (6, True, True)
    assert re.search("error: Training would not fit into the RAM: .* are needed, and 1.0 MiB are free", err)


def test_sizes_and_times_have_a_unit_that_fits():
    sizes = {0: "0.0 KiB", 512: "0.5 KiB", int(2**20 * 99.96): "100 MiB", int(2**30 * 7.25): "7.2 GiB"}
    assert [size(num_bytes) for num_bytes in sizes] == list(sizes.values())
    times = {0.04: "0.0 s", 9.6: "10 s", 119: "119 s", 120: "2.0 min", 7200: "2.0 h"}
    assert [duration(seconds) for seconds in times] == list(times.values())
