"""What `init` says of this machine, of a model and of data that only the libraries can judge.

It says so after its node has started, of which there is a stand-in here, and before anybody is invited.
Models, tokenizers and data are real, and loaded from a folder. What `trahiv check` knows is in
`test_broken_recipes.py`; `tests/swarm/test_exit_codes.py` has some of this with real processes.
"""

import contextlib
import importlib.util
import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def require_nobody_invited(events, run):
    """Check that a command said no step, and wrote only what tells why there is none."""
    assert {event["event"] for event in events} <= {"waiting", "error"}
    told = events_in((run / "events.jsonl").read_text())
    assert told[-1]["event"] == "error", "the run's own record says why there is no run"
    assert {path.name for path in run.iterdir()} <= BEFORE_AN_INVITATION


# -- the model, the data, the packages -------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that `init` finds when it prepares to train."""

    message: str
    hint: str
    code: int = 3
    model: Callable[[Path], Path] | None = None
    """Writes the model to a folder; default: the tiny one from scratch."""

    task: str = "clm"
    section: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    file: str = "rows.jsonl"
    content: str = ""
    """Of the file that is trained on; default: the tiny recipe's text."""

    folder: str = ""
    """An empty one beside the recipe."""

    lacks: str = ""
    """A package that is not installed."""


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(answer):
    return {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": answer}]}


def llama_without_template(folder):
    return write_llama(folder, chat_template=None)


CHATS = lines([chat("Yes."), chat("No.")] * 8)
LONG_PROMPTS = lines([{"prompt": f"Say {number}. " * 20, "completion": "Yes."} for number in range(120)])

FAULTS = {
    "no model": Fault(
        "model' is not a model", "save_pretrained", folder="model",
        changes={"model__config": None, "model__model_name_or_path": "./model"},
    ),
    "no tokenizer": Fault(
        "tokens' could not be loaded", "", folder="tokens",
        changes={"model__tokenizer_name_or_path": "./tokens"},
    ),
    "too large": Fault(
        r"needs [\d.]+ GiB of RAM .* [\d.]+ GiB are free", "peft", code=6, changes={"model__config": HUGE}
    ),
    "no chat template": Fault(
        "holds conversations, and the tokenizer has no chat template", r"data\.chat_template: FILE\.jinja",
        3, llama_without_template, "sft", {"max_length": 64}, content=CHATS,
    ),
    "a template without marks": Fault(
        "could not be prepared: The chat template is not training-compatible", "`sft.assistant_only_loss`",
        3, write_llama, "sft", {"max_length": 64, "assistant_only_loss": True}, content=CHATS,
    ),
    "nothing to learn": Fault(
        "none of the first 100 samples trains a token", "`sft.max_length`.*`trahiv preview RECIPE`",
        3, write_llama, "sft", {"max_length": 32, "packing": True}, content=LONG_PROMPTS,
    ),
    "less than a batch": Fault(
        "Samples in the training data: 1; in one local batch: 2", "per_device_train_batch_size",
        file="rows.txt", content="a text of one block and a half, which is less than two of them",
    ),
    "rows that are no JSON": Fault(
        r"rows\.jsonl could not be read: JSON parse error: Missing a name .* in row 1", "bring it again",
        content=lines([{"text": "a"}]) + "{'text': 'b'}\n",
    ),
    "a table with a comma too many": Fault(
        r"rows\.csv could not be read: .*Expected 2 fields in line 3, saw 3", "bring it again",
        file="rows.csv", content="text,n\na,1\nb, c,2\n",
    ),
    "4 bits without bitsandbytes": Fault(
        "asks for a quantized model .* bitsandbytes is not installed", "pip install bitsandbytes",
        model=write_llama, changes={"quantization": {"load_in_4bit": True}, "peft": {"r": 2}},
        lacks="bitsandbytes",
    ),
    "8-bit optimizer without bitsandbytes": Fault(
        "optim=paged_adamw_8bit needs a package that is not installed", "pip install .*bitsandbytes",
        changes={"training__optim": "paged_adamw_8bit"}, lacks="bitsandbytes",
    ),
    "float16 on a CPU": Fault(
        "float16 .* needs a GPU, and this machine has none", "training.fp16=false",
        changes={"training__fp16": True},
    ),
}  # fmt: skip


def write_fault(folder, fault):
    changes = dict(fault.changes)
    if fault.folder:
        (folder / fault.folder).mkdir()
    if fault.model is not None:
        changes["model"] = {"model_name_or_path": str(fault.model(folder / "model"))}
    if fault.task != "clm":
        changes |= {"task": fault.task, "clm": None, fault.task.replace("-", "_"): fault.section}
    if fault.content:
        (folder / fault.file).write_text(fault.content)
        changes["data"] = {"datasets": [{"path": fault.file}]}
    return write_tiny(folder, **changes)


def hide(package, monkeypatch):
    """Make it look as if a package was not installed, to those who look for it."""
    trainer_optimizer.is_bitsandbytes_available()  # the answer is kept: for others it must be the right one
    find_spec = importlib.util.find_spec

    def find(name, *place):
        return None if name.partition(".")[0] == package else find_spec(name, *place)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(trainer_optimizer, "is_bitsandbytes_available", lambda: False)


@pytest.mark.parametrize("name", FAULTS)
def test_init_says_it_before_it_invites_anybody(name, init, tmp_path, monkeypatch):
    fault = FAULTS[name]
    recipe = write_fault(tmp_path, fault)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if fault.lacks:
        hide(fault.lacks, monkeypatch)
    events = only_error(init(recipe, *RUN), fault.code, fault.message, fault.hint)
    require_nobody_invited(events, tmp_path / "run")


def test_who_is_refused_in_words_gets_no_line_to_join_by(init, tmp_path):
    code, out, err = init(write_fault(tmp_path, FAULTS["no tokenizer"]))
    assert code == 3
    assert "tokens' could not be loaded" in err
    assert err.count("error: ") == err.count("hint: ") == 1
    assert "trahiv join" not in out + err
    (run,) = (tmp_path / "runs").iterdir()
    assert "ready" not in {event["event"] for event in events_in((run / "events.jsonl").read_text())}
    assert {path.name for path in run.iterdir()} <= BEFORE_AN_INVITATION


# -- the run's folder and the network --------------------------------------------------------------


@pytest.fixture
def without_daemon(monkeypatch):
    """Let a node be started but for its daemon, of which nothing here may have need."""

    def start(*_, **__):
        raise AssertionError("a daemon would have been started")

    monkeypatch.setattr(CorrectedDHT, "start", start)


def test_a_folder_that_cannot_be_written_is_refused(trahiv, tmp_path, without_daemon):
    (tmp_path / "mine").write_text("precious")
    for args, folder in (((write_tiny(tmp_path),), "mine"), (("--no-train",), "/proc/trahiv")):
        said = trahiv("init", *args, "--output-dir", folder, "--format", "json")
        assert len(only_error(said, 3, f"{folder} can't be written: ", "--output-dir DIR")) == 1
    assert (tmp_path / "mine").read_text() == "precious"


def test_the_folder_of_another_run_is_left_as_it_is(trahiv, tmp_path, without_daemon):
    (tmp_path / "run").mkdir()
    other = write_tiny(tmp_path, "other.yaml", hivemind_config__opt__run_id="another", training__seed=7)
    before = json.dumps(resolve(load_recipe(other).recipe).to_data())
    (tmp_path / "run" / "recipe.json").write_text(before)
    said = trahiv("init", write_tiny(tmp_path), *RUN)
    only_error(said, 3, "holds another run, another: .*training.seed", "--output-dir")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.json", "lock"}
    assert (tmp_path / "run" / "recipe.json").read_text() == before


def test_an_identity_that_is_no_key_is_kept_and_refused(trahiv, tmp_path, without_daemon):
    (tmp_path / "me.key").write_text("garbage\n")
    (tmp_path / "me.key").chmod(0o600)
    said = trahiv("init", write_tiny(tmp_path), "--identity", "me.key", *RUN)
    events = only_error(said, 3, "me.key is not a libp2p private key", "--identity FILE")
    assert (tmp_path / "me.key").read_text() == "garbage\n"
    require_nobody_invited(events, tmp_path / "run")
    assert not (tmp_path / "run" / "identity.key").exists()


def test_a_port_in_use_is_refused(trahiv, tmp_path, without_daemon):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        said = trahiv("init", write_tiny(tmp_path), "--host-maddr", address, *RUN)
        only_error(said, 3, f"port {port} is already in use", "--host-maddr")
        socket.create_connection(("127.0.0.1", port), 5).close()  # it still answers


# -- data that was edited since --------------------------------------------------------------------


def bytes_of(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def trained(recipe, run):
    """Make the folder of a run of a recipe that has reached step 1."""
    run.mkdir(parents=True)
    resolved = resolve(load_recipe(recipe).recipe)
    (run / "recipe.json").write_text(json.dumps(resolved.to_data()))
    Checkpoints(run / CHECKPOINTS).save(CheckpointData(State(History(step=1)), {}))
    return run


@pytest.fixture
def left(trahiv, monkeypatch):
    """`left("init", ...)` gives the events of a peer that is told to leave when it starts its node."""

    def leave(*_, **__):
        raise Left

    monkeypatch.setattr(peer, "start_node", leave)

    def left(*args):
        code, out, err = trahiv(*args, "--format", "json")
        assert (code, err) == (0, ""), out
        return events_in(out)

    return left


def test_a_finished_run_has_nothing_to_do(trahiv, tmp_path, without_daemon):
    run = trained(write_tiny(tmp_path, training__max_steps=1), Path("run"))
    (run / "final").mkdir()
    code, out, err = trahiv("init", "tiny.yaml", "--output-dir", "run")
    said = "nothing to do: step 1 of 1, the model is in run/final\n"
    assert (code, out, err) == (0, said, "")


def warnings_in(events, code):
    return [event for event in events if event["event"] == "warning" and event["code"] == code]


def test_data_that_was_edited_makes_another_run_which_is_said(left, tmp_path):
    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]})
    run = Path("runs", run_id(resolve(load_recipe("tiny.yaml").recipe)))
    trained("tiny.yaml", run)
    kept, text = bytes_of(run), (tmp_path / "text.txt").read_text()

    (tmp_path / "text.txt").write_text(text + "One more line.\n")
    (said,) = warnings_in(left("init", "tiny.yaml"), "data")
    assert said["message"] == (
        f"This is another run, from step 0: text.txt differs from the one that {run} was trained on, "
        "which is at step 1."
    )
    assert said["hint"] == f"bring the old text.txt back and type the same command to go on with {run}"
    assert bytes_of(run) == kept
    (another,) = set(Path("runs").iterdir()) - {run}
    assert not saved_in(another), "it begins anew"

    (tmp_path / "text.txt").write_text(text)
    events = left("init", "tiny.yaml")
    assert warnings_in(events, "data") == []
    assert Path(events[-1]["path"]) == run / "checkpoints" / "step-1", "the old one goes on"
    assert len(list(Path("runs").iterdir())) == 2


def test_a_run_with_a_name_of_its_own_does_not_take_edited_data(trahiv, tmp_path, without_daemon):
    write_tiny(tmp_path, data={"datasets": [{"path": "text.txt"}]}, hivemind_config__opt__run_id="mine")
    run = trained("tiny.yaml", Path("runs/mine"))
    kept = bytes_of(run)
    (tmp_path / "text.txt").write_text("Another text.\n" * 200)
    said = trahiv("init", "tiny.yaml", "--format", "json")
    only_error(
        said, 3,
        "^runs/mine holds another run, mine: it differs in the content of text.txt.$",
        "^bring the old text.txt back to go on with it, or choose another place",
    )  # fmt: skip
    assert bytes_of(run) == kept | {run / "lock": b""}
