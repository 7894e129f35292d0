"""A recipe, its folder, its model and its data, from the typed command to its messages.

Reading a recipe from a pipe, or one whose data has moved, is in `tests/unit/recipe`.
"""

import json
import shlex

import pytest

from tests.kit.commands import LOOPBACK
from tests.kit.recipes import write_tiny
from tests.kit.stand_ins import CHATML_MARKED, write_llama
from tests.swarm.conftest import advance, recorded

pytestmark = pytest.mark.timeout(120)


def test_joiner_finds_data_in_named_folder(start_paced, tmp_path):
    alice, bob = tmp_path / "alice", tmp_path / "bob"
    write_tiny(alice, data__datasets=[{"path": "text.txt"}], training__max_steps=100_000)
    first = start_paced("init", "tiny.yaml", cwd=alice)
    text, own = (alice / "text.txt").read_text(), bob / "downloads/new/any name.txt"
    own.parent.mkdir(parents=True)
    own.write_text(text)
    (bob / "downloads/decoy.txt").write_text(text.swapcase())
    join = ("join", "--peer", first.address, "--yes", *LOOPBACK)
    peer = start_paced(*join, "--files", "downloads", cwd=bob)
    assert peer.wait_for("joined", 90)["peers"] == 2
    resolved = json.loads((bob / f"runs/{peer.wait_for('ready', 1)['run_id']}/recipe.json").read_text())
    assert resolved["data"]["datasets"][0]["path"] == str(own)


def test_piped_recipe_resumes_by_printed_line(trahiv, tmp_path):
    recipe = write_tiny(tmp_path, data__datasets=[{"path": "text.txt"}], name=None)
    given = recipe.read_text()
    recipe.rename(tmp_path / "template.txt")
    from_pipe = ("sh", "-c", 'exec "$@" < template.txt', "sh")
    first = trahiv("init", "-", "--budget", "1 steps", "--format", "json", prefix=from_pipe)
    run_id, line = first.wait_for("ready", 1)["run_id"], first.wait_for("done", 1)["resume"]
    assert run_id.startswith("recipe-")
    assert line.startswith(f"trahiv init runs/{run_id}/recipe.json ")

    second = trahiv(*shlex.split(line)[1:])
    assert second.wait_for("ready", 1)["run_id"] == run_id
    assert second.wait_for("joined", 1)["step"] == 1
    assert (first.code, second.code, first.left, second.left) == (0, 0, (), ())
    assert (tmp_path / "runs" / run_id / "recipe.yaml").read_text() == given


def write_peer(folder):
    """Write an endless recipe, and this peer's own copies of its model and its data beside it."""
    write_llama(folder / "model")
    return write_tiny(
        folder,
        model={"model_name_or_path": "./model"},
        quantization={"load_in_4bit": True},
        data={"datasets": [{"path": "text.txt"}]},
        peft={"r": 4, "target_modules": ["q_proj", "v_proj"]},
        training__max_steps=100_000,
        hivemind_config__opt__target_batch_size=64,
    )


def test_different_model_copy_is_refused(trahiv, start, tmp_path):
    """One clear error, and training peers are not disturbed.

    A difference of one number is in `tests/unit/train/test_comparison.py`, refusals before
    anything is loaded are in `tests/unit/cli/test_before_anybody_is_invited.py`.
    """
    begun = start("init", write_peer(tmp_path / "begun"))
    begun.wait_for("step", 60)
    before, run = len(begun.events), tmp_path / "run"
    recipe = write_peer(tmp_path)
    write_llama(tmp_path / "model", seed=1, chat_template=CHATML_MARKED)
    result = trahiv("join", recipe, "--output-dir", "run", "--format", "json", "--peer", begun.address)
    assert (result.code, result.left) == (5, ()), result.out + result.err
    assert "Traceback" not in result.out + result.err
    [error] = result.errors
    assert error == result.events[-1]
    assert error["code"] == "mismatch"
    assert "they differ in: frozen weights, tokenizer" in error["message"]
    assert "same `model.revision`" in error["hint"]
    assert [part for part, _, _ in error["differences"]] == ["frozen weights", "tokenizer"]
    assert all(ours != theirs for _, ours, theirs in error["differences"])

    assert {event["event"] for event in result.events} <= {"waiting", "ready", "error"}, "nothing was trained"
    assert recorded(run)[-1]["event"] == "error", "the run's own record says why there is no run"
    assert not (run / "checkpoints").exists()
    advance(begun, steps=1, timeout=30)
    since = [one for one in begun.events[before:] if one["event"] != "reach"]  # the visitor has dialled it
    assert all((one["event"], one["peers"], one["round"]) == ("step", 1, None) for one in since), since
    assert not begun.noise
