"""Two people, two terminals, one model: the real commands on loopback, readable as a story."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.commands import LOOPBACK, left_by
from tests.kit.recipes import TEXT, write_tiny
from tests.swarm.conftest import above, id_of, recorded, told

pytestmark = pytest.mark.timeout(240)


def assert_same_weights(first, second):
    one, two = (load_file(run / "final/model.safetensors") for run in (first, second))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_peers_join_at_start_and_midway(start_paced, tmp_path):
    recipe = write_tiny(
        tmp_path,
        data={"datasets": [{"path": "builtin/trahiv"}]},
        training__max_steps=30,
        training__learning_rate=5e-3,
        hivemind_config__opt__target_batch_size=40,
        hivemind_config__opt__matchmaking_time=5,
        hivemind_config__opt__averaging_timeout=30,
    )
    # A new process has other hashes than the forks that join it: nothing may depend on the order of a set.
    first = start_paced("init", recipe, "--output-dir", "first", is_cold=True)
    ready = first.wait_for("ready", 60)
    assert ready["join"] == f"trahiv join --peer @{tmp_path / 'first' / 'invitation'}"
    assert ready["maddrs"][0].endswith(f"/p2p/{ready['peer_id']}")

    pasted = [*shlex.split(ready["join"])[1:], *LOOPBACK]
    second = start_paced(*pasted, "--yes")  # the choice of folders is in tests/unit/run/test_folder.py
    assert second.wait_for("ready", 60)["fingerprint"] == ready["fingerprint"]
    second.wait_for("joined", 60)
    first.wait_for_group(peers=2)

    first.wait_for("step", 60, step=above(2))
    third = start_paced(*pasted, "--yes")
    joined = third.wait_for("joined", 90)
    chosen = third.wait_for("folder", 1)
    folder = chosen["path"]
    assert folder == f"runs/{ready['run_id']}-2"
    assert chosen["message"].endswith("is that of another peer.")
    assert joined["source"] == "swarm"
    assert joined["step"] >= 3, "it got the swarm's state, not a fresh model"
    committed = first.wait_for_group(size=3)["round"]
    assert committed["committed"]
    assert set(committed["group"]) == set(map(id_of, (first, second, third)))
    assert committed["bytes_sent"] > 0
    assert committed["bytes_received"] > 0

    for peer in (first, second, third):
        done = peer.wait_for("done", 120)
        assert (done["step"], done["reason"]) == (30, "max_steps")
        assert peer.exit_code(30) == 0
        assert peer.noise == []
        assert left_by(peer.pid) == []
    for other in (folder.removesuffix("-2"), folder):
        assert_same_weights(tmp_path / "first", tmp_path / other)
    losses = [step["loss"] for step in first.steps if step["loss"] is not None]
    assert losses[-1] < losses[0] - 0.1

    assert recorded(tmp_path / "first") == first.events, "the file and the screen tell the same"
    assert (tmp_path / "first/identity.key").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "first/recipe.json").read_text())["name"] == "tiny"


def test_lone_peer_leaves_loadable_model(trahiv, tmp_path):
    length = 32
    gpt2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 1, "n_head": 2}
    gpt2["n_positions"] = length
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{one} times {TEXT}"}) + "\n" for one in range(9)))
    data = {"datasets": [{"path": str(documents)}], "eval": {"test_split_size": 0.2}}
    recipe = write_tiny(tmp_path, training__max_steps=3, data=data, model__config=gpt2)
    result = trahiv("init", recipe, "--output-dir", "run", "--format", "json")
    assert (result.code, result.left) == (0, ()), result.err
    names = [event["event"] for event in result.events if event["event"] != "waiting"]
    assert (names[0], names[-1]) == ("ready", "done")
    steps = [(one["step"], one["round"], one["peers"], one["samples"]) for one in result.steps]
    assert steps == [(step, None, 1, 8) for step in (1, 2, 3)]
    before, after = told(result.events, "sample")
    assert (before["step"], after["step"]) == (0, 3), "what the model writes before training and after it"
    assert before["prompt"] == after["prompt"] != ""
    assert before["text"] != after["text"]
    assert len(before["prompt"] + before["text"]) <= length

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    assert model(**tokenizer("hello", return_tensors="pt")).logits.shape[-1] == 384


def test_bootstrap_node_introduces_two_peers(start_paced, tmp_path):
    node = start_paced("init", "--no-train", *LOOPBACK, "--output-dir", "node")
    recipe = write_tiny(tmp_path, training__max_steps=8, hivemind_config__opt__target_batch_size=40)
    peers = [start_paced("join", recipe, "--peer", node.address, "--output-dir", name) for name in ("a", "b")]
    for peer in peers:
        assert peer.exit_code(150) == 0
        peer.wait_for("step", 1, round=lambda round_: round_ and round_["committed"])
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    assert node.is_running
