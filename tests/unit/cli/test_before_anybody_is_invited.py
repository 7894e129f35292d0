"""Errors of `init` and `join` about this machine, data that only the libraries can judge, runs and recipes.

They come after a node has started, which is a stand-in here, and before an invitation is written.
The checks of `trahiv check` are in `test_broken_recipes.py`, some of these errors with real processes in
`tests/swarm/test_exit_codes.py`.
"""

import contextlib
import functools
import json
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import trainer_optimizer

from tests.kit.fakes import FakeNode
from tests.kit.recipes import tiny_llama, write_tiny
from tests.unit.cli.conftest import ADDRESS
from trahiv_cli.cli import swarm
from trahiv_cli.progress.history import History
from trahiv_cli.recipe import content
from trahiv_cli.recipe.agreement import resolve
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.recipe.record import pack
from trahiv_cli.run import folder, peer_options
from trahiv_cli.run.folder import CHECKPOINTS, saved_in
from trahiv_cli.run.leaving import Left
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.swarm.published_run import publish_run
from trahiv_cli.swarm.status import PROTOCOL, Status, publish_status
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import peer
from trahiv_cli.train.checkpoint import CheckpointData, Checkpoints, State

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"data": {"datasets": [{"path": "short.txt"}]}},
            "Samples in the training data: 1; in one local batch: 2",
            "per_device_train_batch_size",
        ),
        ({"training__optim": "paged_adamw_8bit"}, "a package that is not installed", "pip .*bitsandbytes"),
        ({"training__fp16": True}, "float16 .* needs a GPU, and this machine has none", "fp16=false"),
        ({"training__use_liger_kernel": True}, "Liger kernels .* need a GPU", "use_liger_kernel=false"),
        (
            {"model__config": tiny_llama(num_key_value_heads=3)},
            "batch could not be trained in the rehearsal",
            "`model`",
        ),
        ({"training__report_to": ["kubeflow"]}, "'kubeflow' .* is not installed here, or not set up", "pip"),
    ],
)
def test_init_refuses_before_inviting(events, here, monkeypatch, changes, message, hint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(peer_options, "start_node", lambda *_, **__: FakeNode())
    monkeypatch.setattr(peer, "announce", lambda *_: pytest.fail("others would have been invited"))
    (here / "short.txt").write_text("a text of one block and a half, which is less than two of them")
    *_, error = events("init", write_tiny(here, **changes), code=3)
    assert re.search(message, error["message"])
    assert re.search(hint, error["hint"])


def test_slow_data_read_is_announced(events, here, monkeypatch):
    read = content.content_of
    monkeypatch.setattr(Events, "waiting", functools.partialmethod(Events.waiting, every_s=0.01))
    monkeypatch.setattr(content, "content_of", lambda dataset: time.sleep(0.1) or read(dataset))
    monkeypatch.setattr(swarm, "live", lambda *_: None)
    waiting, *_ = events("init", write_tiny(here))
    assert waiting == waiting | {"event": "waiting", "what": "the data files to be read"}


@pytest.fixture
def without_daemon(monkeypatch):
    """Fail if a node's daemon is started, which no test here may need."""
    monkeypatch.setattr(CorrectedDHT, "start", lambda *_, **__: pytest.fail("a daemon would be started"))


def bytes_of(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def trained(**changes):
    """Make the folder of a run of the tiny recipe at step 1."""
    agreed = resolve(load_recipe(write_tiny(Path(), **changes)).recipe)
    run = Path("runs", agreed.run_id)
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(json.dumps(agreed.recipe.to_data()))
    Checkpoints(run / CHECKPOINTS).save(CheckpointData(State(History(step=1)), {}))
    return run


def test_finished_run_has_nothing_to_do(trahiv, without_daemon):
    run = trained(training__max_steps=1)
    (run / "final").mkdir()
    said = f"nothing to do: step 1 of 1, the model is in {run}/final\n"
    assert trahiv("init tiny.yaml") == (said, "")


def test_folder_of_earlier_version_is_read(trahiv, without_daemon):
    run = trained(training__max_steps=1)
    (run / "final").mkdir()
    file = run / "recipe.json"
    recipe = json.loads(file.read_text())
    recipe["hivemind_config"]["opt"]["averager_opts"] = {}  # at its default; it is no field any more
    file.write_text(json.dumps(recipe))
    out, _ = trahiv("init tiny.yaml")
    assert out.startswith("nothing to do")


def test_edited_data_starts_another_run(events, monkeypatch):
    monkeypatch.setattr(peer_options, "start_node", mock.Mock(side_effect=Left))
    run = trained()
    kept = bytes_of(run)
    Path("text.txt").write_text("Another text.\n" * 200)
    [said] = [event for event in events("init tiny.yaml") if event.get("code") == "data"]
    assert said["message"] == (
        f"This is another run, from step 0: text.txt differs from the one that {run} was trained on, "
        "which is at step 1."
    )
    assert said["hint"] == f"bring the old text.txt back and type the same command to go on with {run}"
    assert bytes_of(run) == kept
    [another] = {*Path("runs").iterdir()} - {run}
    assert not saved_in(another / CHECKPOINTS), "it begins anew"


def test_named_run_refuses_edited_data(events, without_daemon):
    run = trained(hivemind_config__opt__run_id="mine")
    kept = bytes_of(run)
    Path("text.txt").write_text("Another text.\n" * 200)
    *_, error = events("init tiny.yaml", code=3)
    assert error["message"] == "runs/mine holds another run, mine: it differs in the content of text.txt."
    assert error["hint"].startswith("bring the old text.txt back to go on with it, or choose another place")
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
        publish_run(node, theirs.run_id, pack(theirs))
        publish_status(node, Status(run_id=theirs.run_id, step=3, max_steps=4, **spoken))

    return publish


JOIN = f"join --peer {ADDRESS} --yes"


@pytest.mark.usefixtures("publish")
def test_swarm_without_recipe_is_refused(events):
    [error] = events(JOIN, code=4)
    assert error["code"] == "nothing-published"
    assert "no peer publishes a recipe" in error["message"]
    assert "trahiv join RECIPE" in error["hint"]


@pytest.mark.parametrize("recipe", ["", " tiny.yaml"])
def test_swarm_with_other_protocol_is_refused(events, publish, here, recipe):
    publish(protocol=PROTOCOL + 1, version="9.0")
    [error] = events(JOIN + recipe, code=5)
    assert error == error | {"code": "mismatch", "hint": "pip install trahiv==9.0"}
    assert error["message"].startswith(f"This swarm runs trahiv 9.0, which speaks protocol {PROTOCOL + 1};")
    assert not (here / "runs").exists()


def test_wrong_own_value_names_own_option(events, publish):
    publish()
    own = "--set training.report_to=[azure]"
    [error] = events(f"{JOIN} --files . {own}", code=2)
    assert error == error | {"path": "training.report_to.0", "file": own}


def test_differing_fields_are_shown_as_table(trahiv, publish, here):
    publish()
    recipe = write_tiny(here, training__learning_rate=0.5, clm__max_length=64)
    out, err = trahiv(JOIN, recipe, code=5)
    assert out == ""
    assert not (here / "runs").exists()
    assert re.search("^error: .* trains another recipe: it differs in 2", err)
    assert re.findall(r"^  (\S+) +(.+?) {2,}(.+)$", err, re.MULTILINE) == [
        ("field", "here", "in the swarm"),
        ("clm.max_length", "64", "32"),
        ("training.learning_rate", "0.5", "0.001"),
    ]
    assert re.search("\nhint: join without RECIPE.*\n$", err)
