"""`init --dry-run` and `check --deep`: the cost of a run, shown before it starts."""

import re
from dataclasses import replace

import pytest
import torch

from tests.kit.recipes import write_tiny
from tests.unit.assets.conftest import LORA, recipe
from trahiv_cli.assets.model import estimate, require_memory
from trahiv_cli.cli.estimate import memory_table, size, traffic_of
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.step.auto import CODECS_BY_LOSS

torch.set_num_threads(1)


@pytest.fixture
def drawn(nothing_starts, here, trahiv):
    """`drawn(lines, peft={"r": 4})` gives the text of a dry run, which must have these lines."""

    def drawn(*lines, **changes):
        out = trahiv("init --dry-run --format human", write_tiny(here, **changes)).out
        for line in lines:
            assert re.search(rf"^{line}$", out, re.MULTILINE), out
        return out

    return drawn


def test_json_estimate_has_bytes_and_seconds(nothing_starts, here, events):
    file = write_tiny(here, swarm__mode="sync")
    checked, event = events("check --deep", file)
    assert checked["event"] == "checked"
    needed = estimate(load_recipe(file).recipe, length=32)
    told = {"mode": "sync", "longest_sample": 32, "free_device_bytes": None}
    bytes_told = {"activation_bytes": needed.activation_bytes, "total_bytes": needed.total_bytes}
    assert event == event | told | bytes_told | {"event": "estimate"}
    assert needed.total_bytes < event["free_host_bytes"]
    assert event["traffic"]["gradient_bytes"] == 4 * needed.num_trainable
    assert list(event["seconds"]["round_of_2"]) == ["5", "20", "100", "1000"]


@pytest.mark.parametrize(
    ("task", "row", "section", "length"),
    [
        ("reward", {"chosen": "yes", "rejected": "no, no"}, {}, len("no, no") + 1),
        ("kto", {"prompt": "a", "completion": "yes", "label": True}, {}, len("ayes") + 1),
        ("grpo", {"prompt": "abc", "answer": "4"}, {"rewards": "number", "max_completion_length": 8}, 4 + 8),
    ],
)
def test_tasks_of_answers_are_estimated(nothing_starts, here, events, write_rows, task, row, section, length):
    write_rows([row] * 16)
    sections = {"clm": None, task: {"max_length": 32, **section}}
    training = {"max_steps": 1, "per_device_train_batch_size": 8}
    data = {"datasets": [{"path": "rows.jsonl"}]}
    file = write_tiny(here, task=task, data=data, training=training, **sections)
    event = next(one for one in events("check --deep", file) if one["event"] == "estimate")
    assert event["longest_sample"] == length
    assert event["activation_bytes"] > 0
    assert (event["reference_bytes"] > 0) is (task == "kto")


OF_AUTO = (*CODECS_BY_LOSS, "a fragment")


@pytest.mark.parametrize(
    ("mode", "rounds"),
    [
        ("streaming", ["13 steps, 2 peers", "13 steps, many peers"]),
        ("auto", ["a step, 2 peers", "a step, many peers", *(f"{name}, many" for name in OF_AUTO)]),
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
    table = text.partition("1000 Mbit/s\n")[2]
    assert re.findall("^(.*?)  ", table, re.MULTILINE) == [*rounds, "to join"]


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


def test_deep_check_reports_doubt_once(nothing_starts, here, write_rows, events):
    write_rows([{"prompt": "a", "completion": text} for text in ("b", "", "b", "b")])
    data = {"datasets": [{"path": "rows.jsonl"}]}
    file = write_tiny(here, task="sft", clm=None, sft={"max_length": 32}, data=data)
    assert str(events("check --deep", file)).count("has an empty 'completion'") == 1


def test_oversized_run_is_shown_and_refused(nothing_starts, here, trahiv, monkeypatch):
    monkeypatch.setattr("trahiv_cli.assets.model.free_bytes", lambda: {"RAM": 2**20})
    out, err = trahiv("init --dry-run --format plain", write_tiny(here), code=6)
    assert "at the peak" in out
    assert re.search(r"(?s)fingerprint.*error: Training needs \d\.\d GiB of RAM, and 0\.0 GiB are free", err)
    assert "LoRA" in err
    assert not (here / "runs").exists()


def test_joiner_memory_is_counted_in_ram():
    needed = replace(require_memory(recipe()), joiner_bytes=2**50)
    table = "\n".join(memory_table(recipe(), needed, {"RAM": 2**30}, 8))
    assert re.search(r"^when a peer joins +104857[67] GiB$", table, re.MULTILINE), table


def test_sizes_and_times_have_fitting_units():
    sizes = {0: "0.0 KiB", 512: "0.5 KiB", int(2**20 * 99.96): "100 MiB", int(2**30 * 7.25): "7.2 GiB"}
    assert {number: size(number) for number in sizes} == sizes
    times = {0.04: "0.0 s", 9.6: "9.6 s", 119: "2.0 min", 7200: "2.0 h", 10**7: "116 days"}
    assert {seconds: size(seconds, "time") for seconds in times} == times


def traffic_in(mode, **sections):
    wanted = recipe(swarm={"mode": mode}, **sections)
    needed = require_memory(wanted)
    return traffic_of(wanted, needed), needed.trainable_bytes


@pytest.mark.parametrize(
    ("mode", "steps", "fragments", "copies_to_join"),
    [("sync", 1, 1, 3), ("auto", 1, 1, 4), ("diloco", 50, 1, 2.5), ("streaming", 13, 4, 2.5)],
)
def test_traffic_depends_on_mode(mode, steps, fragments, copies_to_join):
    """With local steps a joiner gets momentum, too, and statistics in 8 bits."""
    opt = {"opt": {"grad_compression": "none"}}
    traffic, copy_bytes = traffic_in(mode, hivemind_config=opt, peft=LORA)
    assert traffic == replace(traffic, steps_per_round=steps, num_fragments=fragments)
    sent = traffic.sent()
    of_two, of_many = (fragments * sent[name] / copy_bytes for name in ("round_of_2", "round_of_many"))
    assert (of_two, of_many) == pytest.approx((1, 2), abs=1e-4), "many peers send it almost twice"
    assert traffic.state_bytes / copy_bytes == pytest.approx(copies_to_join, abs=0.05)


def test_traffic_of_auto_has_all_choices():
    traffic, _ = traffic_in("auto")
    assert tuple(traffic.by_choice) == OF_AUTO
    sizes = [*traffic.by_choice.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == traffic.gradient_bytes
