"""What `init` says of this machine, of a model and of data that only the libraries can judge.

It says so after its node has started, of which there is a stand-in here, and before anybody is invited.
Models, tokenizers and data are real, and loaded from a folder. What `trahiv check` knows is in
`test_broken_recipes.py`; `tests/swarm/test_exit_codes.py` has some of this with real processes.
"""

import importlib.util
import json
import re
import socket
from pathlib import Path

import datasets
import pytest
import torch
from transformers import trainer_optimizer

from tests.kit.fakes import FakeNode
from tests.kit.recipes import HUGE, write_tiny
from tests.kit.stand_ins import write_llama
from trahiv_cli.optim.history import History
from trahiv_cli.recipe.agreement import resolve, run_id
from trahiv_cli.recipe.load import load_recipe
from trahiv_cli.swarm.corrections.dht import CorrectedDHT
from trahiv_cli.train import peer
from trahiv_cli.train.checkpoint import CHECKPOINTS, CheckpointData, Checkpoints, State, saved_in
from trahiv_cli.train.leaving import Left

RUN = ("--output-dir", "run", "--format", "json")

BEFORE_AN_INVITATION = {
    *("lock", "recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json"),
    *("identity.key", "owner.key", "secret.key", "members.json"),
}
"""All that a run's folder may hold when nobody was invited."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def init(trahiv, monkeypatch):
    """`init("tiny.yaml", ...)` does all that comes before an invitation; its exit code, stdout and stderr.

    Its node is a stand-in, and a peer that would invite others ends with exit code 1.
    """

    def invite(*_):
        raise AssertionError("others would have been invited")

    monkeypatch.setattr(peer, "start_node", lambda *_, **__: FakeNode())
    monkeypatch.setattr(peer, "announce", invite)
    return lambda *args: trahiv("init", *args)


def events_in(text):
    return [json.loads(line) for line in text.splitlines()]


def only_error(said, code, message, hint):
    """Check the only error of a command with `--format json` that has ended; return its events."""
    left, out, err = said
    events = events_in(out)
    assert (left, err) == (code, ""), said
    (error,) = [event for event in events if event["event"] == "error"]
    assert events[-1] == error
    assert re.search(message, error["message"]), error
    assert re.search(hint, error["hint"]), error
    return events


# -- the model, the data, the packages -------------------------------------------------------------

NO_TOKENIZER = {"model__tokenizer_name_or_path": "./tokens"}
TOO_LARGE = {"model__config": HUGE}
PROMPTS = "".join(
    json.dumps({"prompt": f"Say {number}. " * 20, "completion": "Yes."}) + "\n" for number in range(120)
)
OF_PROMPTS = {
    "task": "sft", "clm": None, "sft": {"max_length": 32, "packing": True},
    "model": {"model_name_or_path": "./llama"},
}  # fmt: skip

FAULTS = {
    "no tokenizer": (3, "tokens' could not be loaded", "", NO_TOKENIZER, None),
    "too large": (6, r"needs [\d.]+ GiB of RAM .* [\d.]+ GiB are free", "peft", TOO_LARGE, None),
    "nothing to learn": (
        3, "none of the first 100 samples trains a token", "`sft.max_length`.*`trahiv preview RECIPE`",
        OF_PROMPTS, ("rows.jsonl", PROMPTS),
    ),
    "less than a batch": (
        3, "Samples in the training data: 1; in one local batch: 2", "per_device_train_batch_size",
        {}, ("rows.txt", "a text of one block and a half, which is less than two of them"),
    ),
    "8-bit optimizer without bitsandbytes": (
        3, "optim=paged_adamw_8bit needs a package that is not installed", "pip install .*bitsandbytes",
        {"training__optim": "paged_adamw_8bit"}, None,
    ),
    "float16 on a CPU": (
        3, "float16 .* needs a GPU, and this machine has none", "training.fp16=false",
        {"training__fp16": True}, None,
    ),
}  # fmt: skip
"""Exit code, message, hint, what is changed in the recipe, and the name and content of its data."""


def write_fault(name, folder):
    *_, changes, file = FAULTS[name]
    (folder / "tokens").mkdir()
    if name == "nothing to learn":
        write_llama(folder / "llama")
    if file:
        (folder / file[0]).write_text(file[1])
        changes = changes | {"data": {"datasets": [{"path": file[0]}]}}
    return write_tiny(folder, **changes)


def without_bitsandbytes(monkeypatch):
    trainer_optimizer.is_bitsandbytes_available()  # the answer is kept: for others it must be the right one
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "bitsandbytes" else find(name, *_)
    )
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)


@pytest.mark.parametrize("name", FAULTS)
def test_init_says_it_before_it_invites_anybody(name, init, tmp_path, monkeypatch):
    code, message, hint, *_ = FAULTS[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "bitsandbytes" in name:
        without_bitsandbytes(monkeypatch)
    events = only_error(init(write_fault(name, tmp_path), *RUN), code, message, hint)
    # It said no step, and wrote only what tells why there is none.
    assert {event["event"] for event in events} <= {"waiting", "error"}
    told = events_in((tmp_path / "run" / "events.jsonl").read_text())
    assert told[-1]["event"] == "error", "the run's own record says why there is no run"
    assert {path.name for path in (tmp_path / "run").iterdir()} <= BEFORE_AN_INVITATION


# -- the run's folder and the network --------------------------------------------------------------


@pytest.fixture
def without_daemon(monkeypatch):
    """Let a node be started but for its daemon, of which nothing here may have need."""

    def start(*_, **__):
        raise AssertionError("a daemon would have been started")

    monkeypatch.setattr(CorrectedDHT, "start", start)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--output-dir", "mine"), "mine can't be written: ", "--output-dir DIR"),
        (("--identity", "mine", *RUN), "mine is not a libp2p private key", "--identity FILE"),
        (("--host-maddr", "/ip4/127.0.0.1/tcp/{port}", *RUN), "is already in use", "--host-maddr"),
    ],
    ids=["folder", "key", "port"],
)
def test_what_is_taken_is_refused_and_left_as_it_is(trahiv, tmp_path, without_daemon, words, message, hint):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "mine").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = [word.format(port=port) for word in words]
        only_error(trahiv("init", write_tiny(tmp_path), *words, "--format", "json"), 3, message, hint)
        socket.create_connection(("127.0.0.1", port), 5).close()  # it still answers
    assert (tmp_path / "mine").read_text() == "precious"


# -- runs that were there before -------------------------------------------------------------------


def bytes_of(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def trained(run):
    """Make the folder of a run of the tiny recipe that has reached step 1; all that it holds."""
    run.mkdir(parents=True)
    resolved = resolve(load_recipe("tiny.yaml").recipe)
    (run / "recipe.json").write_text(json.dumps(resolved.to_data()))
    Checkpoints(run / CHECKPOINTS).save(CheckpointData(State(History(step=1)), {}))
    return bytes_of(run)


def test_a_finished_run_has_nothing_to_do(trahiv, tmp_path, without_daemon):
    write_tiny(tmp_path, training__max_steps=1)
    trained(tmp_path / "run")
    (tmp_path / "run" / "final").mkdir()
    said = "nothing to do: step 1 of 1, the model is in run/final\n"
    assert trahiv("init", "tiny.yaml", "--output-dir", "run") == (0, said, "")


def test_data_that_was_edited_makes_another_run_which_is_said(trahiv, tmp_path, monkeypatch):
    def leave(*_, **__):
        raise Left

    monkeypatch.setattr(peer, "start_node", leave)

    def init():
        code, out, err = trahiv("init", "tiny.yaml", "--format", "json")
        assert (code, err) == (0, ""), out
        events = events_in(out)
        return events, [event for event in events if event.get("code") == "data"]

    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]})
    run = Path("runs", run_id(resolve(load_recipe("tiny.yaml").recipe)))
    kept, text = trained(run), (tmp_path / "text.txt").read_text()

    (tmp_path / "text.txt").write_text(text + "One more line.\n")
    _, (said,) = init()
    assert said["message"] == (
        f"This is another run, from step 0: text.txt differs from the one that {run} was trained on, "
        "which is at step 1."
    )
    assert said["hint"] == f"bring the old text.txt back and type the same command to go on with {run}"
    assert bytes_of(run) == kept
    (another,) = set(Path("runs").iterdir()) - {run}
    assert not saved_in(another), "it begins anew"

    (tmp_path / "text.txt").write_text(text)
    events, warnings = init()
    assert Path(events[-1]["path"]) == run / "checkpoints" / "step-1", "the old one goes on"
    assert not warnings and len(list(Path("runs").iterdir())) == 2


def test_a_run_with_a_name_of_its_own_does_not_take_edited_data(trahiv, tmp_path, without_daemon):
    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]}, hivemind_config__opt__run_id="mine")
    run = Path("runs/mine")
    kept = trained(run)
    (tmp_path / "text.txt").write_text("Another text.\n" * 200)
    message = "^runs/mine holds another run, mine: it differs in the content of text.txt.$"
    hint = "^bring the old text.txt back to go on with it, or choose another place"
    only_error(trahiv("init", "tiny.yaml", "--format", "json"), 3, message, hint)
    assert bytes_of(run) == kept | {run / "lock": b""}
