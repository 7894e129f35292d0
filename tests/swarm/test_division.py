"""Peers divide the data: each sample once in a pass, whoever dies and comes back. A stop changes nothing."""

from __future__ import annotations

import json
import signal

import pytest
from safetensors.torch import load_file

from tests.kit.commands import LOOPBACK
from tests.kit.recipes import write_tiny
from tests.kit.verdicts import furthest_of
from trahiv_cli.optim.ledger import SHARD

pytestmark = pytest.mark.timeout(240)

STEPS = 12
SHARDS, LINES = 6, 60


def test_a_run_that_was_interrupted_equals_one_that_was_not(trahiv, tmp_path):
    """What each mode keeps in a checkpoint is in `tests/unit/train/test_checkpoint.py`."""
    recipe = write_tiny(
        tmp_path,
        swarm={"mode": "streaming", "local_steps": 4, "fragments": 2},
        model__config__attention_dropout=0.2,
        training__max_steps=STEPS,
        training__lr_scheduler_type="cosine",
        training__warmup_steps=4,
    )
    identity = ("--identity", tmp_path / "key", *LOOPBACK)  # of which the peer's own randomness is drawn
    assert trahiv("init", recipe, "--output-dir", "straight", *identity).code == 0
    half = trahiv("init", recipe, "--output-dir", "halves", "--budget", f"{STEPS // 2} steps", *identity)
    assert half.code == 0 and f"done at step {STEPS // 2} (budget)" in half.out
    assert trahiv("init", recipe, "--output-dir", "halves", *identity).code == 0
    straight, halves = (
        load_file(tmp_path / run / "final" / "model.safetensors") for run in ("straight", "halves")
    )
    assert straight.keys() == halves.keys()
    assert max(float((straight[name] - halves[name]).abs().max()) for name in straight) <= 1e-6
    _, disagreements = furthest_of([tmp_path / run for run in ("straight", "halves")])
    assert disagreements == [], "they have trained the same samples"


def test_each_shard_is_trained_once_in_a_pass_while_peers_are_killed(start_paced, endless, tmp_path):
    """Samples of data that is no stream are looked after by all tests of `tests/simulation`."""
    for number in range(SHARDS):
        lines = (json.dumps({"text": f"file {number}, line {line} " * 4}) for line in range(LINES))
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(lines))
    data = {"datasets": [{"path": str(tmp_path / "part-*.jsonl")}], "streaming": True}
    recipe = endless(training__save_steps=5, data=data)
    first = start_paced("init", recipe, "--output-dir", "first", *LOOPBACK)
    join = ("join", recipe, "--peer", first.address, "--output-dir", "second", "--yes", *LOOPBACK)
    for is_last in (False, False, True):
        second = start_paced(*join)
        second.wait_for_group()
        if not is_last:
            second.kill()
    first.wait_for("step", 120, data=lambda data: data["passes"] >= 1 and data["shards"] == SHARDS)
    for peer in (second, first):
        peer.send_signal(signal.SIGTERM)
        peer.wait_for("done", 30)
        assert peer.exit_code(20) == 143
    ledger, _ = furthest_of([tmp_path / "first"])
    assert ledger.duplicates == 0
    whole, *_ = ledger.covered.spans
    assert whole[0] == 0 and whole[1] >= SHARDS * SHARD, "the first pass"
    assert sum(one["samples"] or 0 for one in first.steps) > SHARDS * LINES
