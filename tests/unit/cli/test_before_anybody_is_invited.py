"""Errors of `init` and `join` about this machine, data that only the libraries can judge, runs and recipes.

They come after a node has started, which is a stand-in here, and before an invitation is written.
The checks of `trahiv check` are in `test_broken_recipes.py`, some of these errors with real processes in
`tests/swarm/test_exit_codes.py`.
"""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import trainer_optimizer

from tests.kit.fakes import FakeNode
from tests.kit.recipes import tiny_llama, write_tiny
from tests.unit.cli.conftest import ADDRESS
from trahiv_cli.cli import swarm
from trahiv_cli.optim.history import History
from trahiv_cli.recipe import content
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.exchange import publish_recipe
from trahiv_cli.swarm.status import PROTOCOL, Status, publish_status
from trahiv_cli.telemetry import events as telemetry
from trahiv_cli.train import folder, peer
from trahiv_cli.train.checkpoint import CHECKPOINTS, CheckpointData, Checkpoints, State, saved_in
from trahiv_cli.train.leaving import Left

pytestmark = pytest.mark.usefixtures("here")


def require_error(said, code, message, hint):
    """Check the only error of a command, its last event; it may have waited before."""
    left, told = said
    *waits, error = told
    assert (left, error["event"]) == (code, "error"), told
    assert {event["event"] for event in waits} <= {"waiting"}, told
    assert re.search(message, error["message"]) and re.search(hint, error["hint"]), error


MISFIT = tiny_llama(num_key_value_heads=3)
SHORT = {"data": {"datasets": [{"path": "short.txt"}]}}


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (SHORT, "Samples in the training data: 1; in one local batch: 2", "per_device_train_batch_size"),
        ({"training__optim": "paged_adamw_8bit"}, "a package that is not installed", "pip .*bitsandbytes"),
        ({"training__fp16": True}, "float16 .* needs a GPU, and this machine has none", "fp16=false"),
        ({"model__config": MISFIT}, "batch could not be trained in the rehearsal", "`model`"),
        ({"training__report_to": ["kubeflow"]}, "'kubeflow' .* is not installed here, or not set up", "pip"),
    ],
)
def test_init_refuses_before_inviting(events, tmp_path, monkeypatch, changes, message, hint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(peer, "start_node", lambda *_, **__: FakeNode())
    monkeypatch.setattr(peer, "announce", lambda *_: pytest.fail("others would have been invited"))
    (tmp_path / "short.txt").write_text("a text of one block and a half, which is less than two of them")
    require_error(events("init", write_tiny(tmp_path, **changes)), 3, message, hint)


def test_slow_data_read_is_announced(events, tmp_path, monkeypatch):
    read = content.content_of
    monkeypatch.setattr(telemetry, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(content, "content_of", lambda dataset: time.sleep(0.1) or read(dataset))
    monkeypatch.setattr(swarm, "live", lambda *_: None)
    code, (waiting, *_) = events("init", write_tiny(tmp_path))
    assert (code, waiting["event"], waiting["what"]) == (0, "waiting", "the data files to be read")


@pytest.fixture
def without_daemon(monkeypatch):
    """Fail if a node's daemon is started, which no test here may need."""
    monkeypatch.setattr(
        CorrectedDHT, "start", lambda *_, **__: pytest.fail("a daemon would have been started")
    )


def bytes_of(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def trained(run):
    """Make the folder of a run of the tiny recipe at step 1, and return its contents."""
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(json.dumps(resolve(load_recipe("tiny.yaml").recipe).recipe.to_data()))
    Checkpoints(run / CHECKPOINTS).save(CheckpointData(State(History(step=1)), {}))
    return bytes_of(run)


def test_finished_run_has_nothing_to_do(trahiv, tmp_path, without_daemon):
    write_tiny(tmp_path, training__max_steps=1)
    trained(tmp_path / "run")
    (tmp_path / "run" / "final").mkdir()
    said = "nothing to do: step 1 of 1, the model is in run/final\n"
    assert trahiv("init", "tiny.yaml", "--output-dir", "run") == (0, said, "")


def test_edited_data_starts_another_run(events, tmp_path, monkeypatch):
    def leave(*_, **__):
        raise Left

    monkeypatch.setattr(peer, "start_node", leave)
    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]})
    run = Path("runs", resolve(load_recipe("tiny.yaml").recipe).run_id)
    kept, text = trained(run), (tmp_path / "text.txt").read_text()

    (tmp_path / "text.txt").write_text(text + "One more line.\n")
    code, told = events("init", "tiny.yaml")
    (said,) = [event for event in told if event.get("code") == "data"]
    assert code == 0 and said["message"] == (
        f"This is another run, from step 0: text.txt differs from the one that {run} was trained on, "
        "which is at step 1."
    )
    assert said["hint"] == f"bring the old text.txt back and type the same command to go on with {run}"
    assert bytes_of(run) == kept
    (another,) = set(Path("runs").iterdir()) - {run}
    assert not saved_in(another), "it begins anew"


def test_named_run_refuses_edited_data(events, tmp_path, without_daemon):
    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]}, hivemind_config__opt__run_id="mine")
    run = Path("runs/mine")
    kept = trained(run)
    (tmp_path / "text.txt").write_text("Another text.\n" * 200)
    message = "^runs/mine holds another run, mine: it differs in the content of text.txt.$"
    hint = "^bring the old text.txt back to go on with it, or choose another place"
    require_error(events("init", "tiny.yaml"), 3, message, hint)
    assert bytes_of(run) == kept | {run / "lock": b""}


@pytest.fixture
def publish(here, nothing_starts, monkeypatch):
    """`publish()` has a swarm publish the tiny recipe; until then, one of its peers answers and has none.

    Its status may be of another protocol.
    """
    node = FakeNode("QmStarter")
    monkeypatch.setattr(folder, "visiting", lambda *_: contextlib.nullcontext(node.neighbour("QmNew")))

    def publish(**spoken):
        theirs = resolve(load_recipe(write_tiny(here)).recipe)
        publish_recipe(node, theirs)
        publish_status(node, Status(run_id=theirs.run_id, step=3, max_steps=4, **spoken))

    return publish


@pytest.mark.usefixtures("publish")
def test_swarm_without_recipe_is_refused(events):
    code, (error,) = events("join", "--peer", ADDRESS, "--yes")
    assert (code, error["code"]) == (4, "nothing-published")
    assert "no peer publishes a recipe" in error["message"] and "trahiv join RECIPE" in error["hint"]


def test_swarm_with_other_protocol_is_refused(events, publish, here):
    publish(protocol=PROTOCOL + 1, version="9.0")
    for recipe in ((), (write_tiny(here),)):
        code, (error,) = events("join", *recipe, "--peer", ADDRESS, "--yes")
        assert (code, error["code"], (here / "runs").exists()) == (5, "mismatch", False)
        assert error["message"].startswith(
            f"This swarm runs trahiv 9.0, which speaks protocol {PROTOCOL + 1};"
        )
        assert error["hint"] == "pip install trahiv==9.0"


def test_wrong_own_value_names_own_option(events, publish, here):
    publish()
    own = ["--set", "training.report_to=[azure]"]
    code, (error,) = events("join", "--peer", ADDRESS, "--yes", "--files", here, *own)
    assert (code, error["path"], error["file"]) == (2, "training.report_to.0", " ".join(own))


def test_different_recipe_lists_differing_fields(trahiv, events, publish, here):
    publish()
    recipe = write_tiny(here, training__learning_rate=0.5)
    code, (error,) = events("join", recipe, "--peer", ADDRESS, "--yes")
    assert (code, error["differences"]) == (5, [["training.learning_rate", 0.5, 0.001]])
    code, out, err = trahiv("join", recipe, "--set", "clm.max_length=64", "--peer", ADDRESS)
    assert (code, out, (here / "runs").exists()) == (5, "", False)
    assert re.search("^error: .* trains another recipe: it differs in 2", err)
    assert re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", err, re.MULTILINE) == [
        ("field", "here", "in the swarm"),
        ("clm.max_length", "64", "32"),
        ("training.learning_rate", "0.5", "0.001"),
    ]
    assert re.search("\nhint: join without RECIPE.*\n$", err)
