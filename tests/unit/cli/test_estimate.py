"""`init --dry-run` and `check --deep`: the cost of a run, shown before it starts."""

import json
import re
from dataclasses import replace

import pytest
import torch

from tests.kit.recipes import write_tiny
from tests.unit.assets.conftest import LORA, recipe
from trahiv_cli.assets.model import estimate, require_memory
from trahiv_cli.cli.estimate import TIME_UNITS, memory_table, size, traffic_of
from trahiv_cli.optim.auto import CODECS_BY_LOSS
from trahiv_cli.recipe.load import load_recipe

torch.set_num_threads(1)


@pytest.fixture
def drawn(nothing_starts, here, trahiv):
    """`drawn(lines, peft={"r": 4})` gives the text of a dry run, which must have these lines."""

    def drawn(*lines, **changes):
        code, out, _ = trahiv("init", write_tiny(here, **changes), "--dry-run", "--format", "human")
        assert code == 0 and all(re.search(rf"^{line}$", out, re.MULTILINE) for line in lines), out
        return out

    return drawn


def test_json_estimate_has_bytes_and_seconds(nothing_starts, here, events):
    file = write_tiny(here, swarm__mode="sync")
    code, (checked, event) = events("check", file, "--deep")
    assert (code, checked["event"], event["event"]) == (0, "checked", "estimate")
    needed = estimate(load_recipe(file).recipe, length=32)
    assert (event["longest_sample"], event["free_device_bytes"]) == (32, None)
    assert event["activation_bytes"] == needed.activation_bytes
    assert event["total_bytes"] == needed.total_bytes < event["free_host_bytes"]
    assert event["traffic"]["gradient_bytes"] == 4 * needed.num_trainable
    assert list(event["seconds"]["round_of_2"]) == ["5", "20", "100", "1000"]
    _, (_, event) = events("check", write_tiny(here), "--deep")
    assert event["mode"] == "auto"
    many = [event["seconds"][name]["5"] for name in (*CODECS_BY_LOSS, "a fragment")]
    assert sorted(many, reverse=True) == many and many[0] == event["seconds"]["round_of_many"]["5"]


OF_AUTO = [f"{name}, many" for name in (*CODECS_BY_LOSS, "a fragment")]


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers"]),
        ("auto", ["a step, 2 peers", "a step, many peers", *OF_AUTO]),
    ],
)
def test_dry_run_table_follows_mode(drawn, mode, rounds):
    text = drawn(
        r"trained weights +[\d.]+ KiB +[\d.]+k, float32",
        r"activations +[\d.]+ .iB +2 x 32 tokens",
        rf"mode {mode} +[\d.]+ .iB +copies, at most",
        r"free here +[\d.]+ GiB",
        swarm__mode=mode,
    )
    told = text.partition("1000 Mbit/s\n")[2].splitlines()
    assert [re.split(r" {2,}", line)[0] for line in told] == [*rounds, "to join"]


def test_gpu_has_own_column(drawn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34, 2**34))
    drawn(
        " +GPU +RAM",
        r"optimizer state +[\d.]+ KiB +- +paged_adamw_8bit",
        r"libraries +- +[\d.]+ MiB +in all processes",
        r"free here +16.0 GiB +[\d.]+ GiB",
        peft={"r": 4},
        training__optim="paged_adamw_8bit",
    )


def test_deep_check_reports_doubt_once(nothing_starts, here, events):
    rows = [{"prompt": "a", "completion": "b" * (n != 1)} for n in range(8)]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"datasets": [{"path": "rows.jsonl"}]}
    code, told = events(
        "check", write_tiny(here, task="sft", clm=None, sft={"max_length": 32}, data=data), "--deep"
    )
    doubts = [event["message"] for event in told if "has an empty 'completion'" in event.get("message", "")]
    assert code == 0 and len(doubts) == 1


def test_oversized_run_is_shown_and_refused(nothing_starts, here, trahiv, monkeypatch):
    monkeypatch.setattr("trahiv_cli.assets.model.free_bytes", lambda: {"RAM": 2**20})
    words = ("--format", "plain", "--wait", "5m", "--host-maddr", "/ip4/127.0.0.1/tcp/0")
    code, out, err = trahiv("init", write_tiny(here), "--dry-run", *words)
    assert (code, "at the peak" in out, "LoRA" in err) == (6, True, True)
    assert "fingerprint" in err and not (here / "runs").exists(), "the short summary, and nothing else"
    assert re.search(r"error: Training needs \d\.\d GiB of RAM, and 0\.0 GiB are free", err)


def test_joiner_memory_is_counted_in_ram():
    needed = replace(require_memory(recipe()), joiner_bytes=2**50)
    table = "\n".join(memory_table(recipe(), needed, {"RAM": 2**30}, 8))
    assert re.search(r"^when a peer joins +104857[67] GiB$", table, re.MULTILINE), table


def test_sizes_and_times_have_fitting_units():
    sizes = {0: "0.0 KiB", 512: "0.5 KiB", int(2**20 * 99.96): "100 MiB", int(2**30 * 7.25): "7.2 GiB"}
    assert [size(num_bytes) for num_bytes in sizes] == list(sizes.values())
    times = {0.04: "0.0 s", 9.6: "9.6 s", 119: "2.0 min", 7200: "2.0 h", 10**7: "116 days"}
    assert [size(seconds, TIME_UNITS) for seconds in times] == list(times.values())


@pytest.mark.parametrize(
    ("mode", "steps", "fragments", "copies_to_join"),
    [("sync", 1, 1, 3), ("auto", 1, 1, 4), ("diloco", 50, 1, 2.5), ("streaming", 13, 4, 2.5)],
)
def test_traffic_depends_on_mode(mode, steps, fragments, copies_to_join):
    """With local steps a joiner gets momentum, too, and statistics in 8 bits."""
    opt = {"opt": {"grad_compression": "none"}}
    wanted = recipe(swarm={"mode": mode}, hivemind_config=opt, peft=LORA)
    needed = require_memory(wanted)
    traffic = traffic_of(wanted, needed)
    assert list(traffic.by_choice) == (["none", "a fragment"] if mode == "auto" else [])
    assert (traffic.steps_per_round, traffic.num_fragments) == (steps, fragments)
    sizes = traffic.sent()
    sent = [fragments * sizes[name] / needed.trainable_bytes for name in ("round_of_2", "round_of_many")]
    assert sent == pytest.approx([1, 2], abs=1e-4), "many peers send it almost twice"
    assert traffic.state_bytes / needed.trainable_bytes == pytest.approx(copies_to_join, abs=0.05)
