"""What a recipe, its data or another peer's copies can have wrong, task by task, through the real commands.

Each gets one clear error: what, and where there is one the file and the line; a hint; the contract's exit
code. `trahiv check` says what it can know in a second, `init` the rest before it invites anybody. A joiner
that loaded something else is sent away, and those who train do not notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.kit.stand_ins import CHATML_MARKED, write_bert, write_llama

pytestmark = pytest.mark.timeout(120)

JSON = ("--format", "json")
RUN = ("--output-dir", "run", *JSON)


def require_refused(result: Any, code: int, message: str, hint: str) -> dict[str, Any]:
    """Check that a command with `--format json` ended with one error and left nothing; return the error."""
    __tracebackhide__ = True
    story = f"{result.args}\nstdout:\n{result.out}\nstderr:\n{result.err}"
    assert result.code == code, story
    assert "Traceback" not in result.out + result.err, story
    assert result.left == (), f"{story}\nleft: {result.left}"
    assert [event["event"] for event in result.events][-1] == "error", story
    (error,) = result.errors
    assert re.search(message, error["message"]), f"{message!r} not in:\n{story}"
    assert re.search(hint, error["hint"]), f"{hint!r} not in:\n{story}"
    return error


def require_nothing_trained(result: Any, run: Path, *, had_invited: bool = False) -> None:
    """Check that a command that ended had invited nobody, said no step, and wrote only what tells why."""
    assert {event["event"] for event in result.events} <= {"waiting", "error", *["ready"] * had_invited}
    if not run.exists():
        return
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert told[-1]["event"] == "error", "the run's own record says why there is no run"
    assert {path.name for path in run.iterdir()} <= {
        *("recipe.yaml", "recipe.json", "events.jsonl", "trahiv.log", "peers.json", "members.json"),
        *("identity.key", "owner.key", "secret.key", "invited-by", "lock", *["invitation"] * had_invited),
    }


# -- what `check` knows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """Something in a recipe that can't be meant."""

    changes: dict[str, Any]
    path: str
    message: str
    hint: str = ""


MLM = {"task": "mlm", "clm": None}
LOADED = {"model": {"model_name_or_path": "owner/model"}}
NF4 = {"quantization": {"load_in_4bit": True}}

MISTAKES = {
    "another task's section": Mistake(
        {"task": "dpo", "dpo": {}}, "clm", r"about `task: clm`.* is `dpo`: change"
    ),
    "packing with mlm": Mistake({**MLM, "mlm": {"packing": True}}, "mlm.packing", "unknown key", "remove it"),
    "4 bits without adapters": Mistake({**LOADED, **NF4}, "quantization", "add a `peft` section"),
    "4 bits from scratch": Mistake(
        {**NF4, "peft": {"r": 2}}, "quantization", "`model.config` makes a new one"
    ),
    "a template without conversations": Mistake(
        {"data__chat_template": "{{ messages }}"}, "data.chat_template", "reads plain text, not conversations"
    ),
} | {
    optim: Mistake(
        {"training__optim": optim}, "training.optim", f"'{optim}' can't work in a swarm: {why}", "`adam"
    )
    for optim, why in {
        "galore_adamw_layerwise": "it updates each layer in a hook",
        "galore_adamw": "its state holds projections",
        "adalomo": "it updates weights during the backward pass",
        "schedule_free_adamw": "it keeps two sets of weights",
        "adamw_torch_4bit": "its state is in torchao's own kind of tensors",
        "grokadamw": "it keeps its state among its settings",
    }.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_check_points_at_what_cannot_be_meant(name, trahiv, tmp_path, tiny_recipe):
    mistake = MISTAKES[name]
    recipe = tiny_recipe(tmp_path, **mistake.changes)
    result = trahiv("check", recipe, *JSON)
    error = require_refused(result, 2, mistake.message, mistake.hint)
    assert (error["code"], error["file"], error["path"]) == ("recipe", str(recipe), mistake.path)
    pointed_at = recipe.read_text().splitlines()[error["line"] - 1]
    assert pointed_at.strip().startswith(f"{mistake.path.rpartition('.')[2]}:")


# -- what only this machine and the data can tell -------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that `init` finds before it invites anybody."""

    message: str
    hint: str
    model: Callable[[Path], Path] | None = None
    """Writes the model to a folder; default: the tiny one from scratch."""

    task: str = "clm"
    section: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    file: str = "rows.jsonl"
    content: str = ""
    """Of the file that is trained on; default: the tiny recipe's text."""

    code: int = 3
    lacks: str = ""
    """A package that is not installed."""


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": answer}]}


def llama_without_template(folder: Path) -> Path:
    return write_llama(folder, chat_template=None)


CHATS = lines([chat("Yes."), chat("No.")] * 8)
PREFERENCES = lines([{"prompt": "Hi. ", "winner": "Yes.", "loser": "No."}] * 8)
REVIEWS = lines([{"text": "a film", "label": number} for number in (0, 1, 2, 0)])
LONG_PROMPTS = lines([{"prompt": f"Say {number}. " * 20, "completion": "Yes."} for number in range(120)])

FAULTS = {
    "no chat template": Fault(
        "holds conversations, and the tokenizer has no chat template", r"data\.chat_template: FILE\.jinja",
        llama_without_template, "sft", {"max_length": 64}, content=CHATS,
    ),
    "a template without marks": Fault(
        "`sft.assistant_only_loss` is on, and the chat template marks no assistant tokens",
        "`sft.assistant_only_loss: false`",
        write_llama, "sft", {"max_length": 64, "assistant_only_loss": True}, content=CHATS,
    ),
    "no preferences": Fault(
        r"rows.jsonl' has no `chosen` and `rejected`; it has prompt, winner, loser\.",
        "winner: chosen, loser: rejected",
        write_llama, "dpo", {"max_length": 64}, content=PREFERENCES, code=2,
    ),
    "a label out of range": Fault(
        r"Row 3 of '.*rows.jsonl' has the label 2, and `seq_cls.labels` names 2 classes: bad, good\.",
        "a number from 0 to 1",
        write_bert, "seq-cls", {"labels": ["bad", "good"]}, content=REVIEWS, code=2,
    ),
    "nothing to learn": Fault(
        "none of the first 100 samples trains a token", "`sft.max_length`.*`trahiv preview RECIPE`",
        write_llama, "sft", {"max_length": 32, "packing": True}, content=LONG_PROMPTS,
    ),
    "less than a batch": Fault(
        "Samples in the training data: 1; in one local batch: 2", "per_device_train_batch_size",
        file="rows.txt", content="a text of one block and a half, which is less than two of them",
    ),
    "a broken line in a CSV": Fault(
        r"rows\.csv, line 3: 3 fields, and the header has 2\.", "in quotes",
        file="rows.csv", content='text,stars\na film,3\na film, a bad one,1\n"a film, a good one",5\n',
        code=2,
    ),
    "JSON Lines cut in the middle": Fault(
        r"rows\.jsonl, line 3: the file ends in the middle of the line\.", "Bring the file again",
        content='{"text": "a film"}\n{"text": "a film"}\n{"text": "a fi', code=2,
    ),
    "4 bits without bitsandbytes": Fault(
        "asks for a quantized model .* bitsandbytes is not installed", "pip install bitsandbytes",
        write_llama, changes={**NF4, "peft": {"r": 2}}, lacks="bitsandbytes",
    ),
    "8-bit optimizer without bitsandbytes": Fault(
        "optim=paged_adamw_8bit needs a package that is not installed", "pip install .*bitsandbytes",
        changes={"training__optim": "paged_adamw_8bit"}, lacks="bitsandbytes",
    ),
    "float16 on a CPU": Fault(
        "float16 .* needs a GPU, and this machine has none", "training.fp16=false",
        changes={"training__fp16": True},
    ),
    "a tracker that is not there": Fault(
        "'azure_ml' .* is not installed", "pip install azureml-core",
        changes={"training__report_to": ["azure_ml"]},
    ),
    "a tracker that nobody knows": Fault(
        "got 'tensorbord'", "did you mean `tensorboard`",
        changes={"training__report_to": ["tensorbord"]}, code=2,
    ),
}  # fmt: skip


def write_fault(folder: Path, fault: Fault, tiny_recipe: Callable[..., Path]) -> Path:
    changes = dict(fault.changes)
    if fault.model is not None:
        changes["model"] = {"model_name_or_path": str(fault.model(folder / "model"))}
    if fault.task != "clm":
        changes |= {"task": fault.task, "clm": None, fault.task.replace("-", "_"): fault.section}
    if fault.content:
        (folder / fault.file).write_text(fault.content)
        changes["data"] = {"datasets": [{"path": fault.file}]}
    return tiny_recipe(folder, **changes)


HIDING = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, *place: None if name.partition(".")[0] == {package!r} else find_spec(name, *place)
)
"""
"""A `sitecustomize.py`: Python runs it at its start, and then finds the package nowhere."""


def without(package: str, folder: Path) -> dict[str, str]:
    """Make an environment in which a package is not installed."""
    (folder / "hiding").mkdir()
    (folder / "hiding" / "sitecustomize.py").write_text(HIDING.format(package=package))
    return {"PYTHONPATH": str(folder / "hiding")}


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, open_workplace: Any, tiny_recipe: Any
) -> Iterator[dict[str, tuple[Future[Any], Path]]]:
    """Fault -> how `init` ends with it, and the run's folder. As many run at a time as there are cores."""
    chosen = [
        item.callspec.params["fault"] for item in request.session.items if "endings" in item.fixturenames
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool, ExitStack() as places:
        started = {}
        for name in chosen:
            place = places.enter_context(open_workplace("fault"))
            recipe = write_fault(place.folder, FAULTS[name], tiny_recipe)
            env = without(FAULTS[name].lacks, place.folder) if FAULTS[name].lacks else {}
            started[name] = pool.submit(place.run, "init", recipe, *RUN, env=env), place.folder / "run"
        yield started
        pool.shutdown(cancel_futures=True)  # where one failed and the rest was not asked for


@pytest.mark.parametrize("fault", FAULTS)
def test_init_says_it_before_it_invites_anybody(fault, endings):
    ending, run = endings[fault]
    result, wanted = ending.result(), FAULTS[fault]
    require_refused(result, wanted.code, wanted.message, wanted.hint)
    require_nothing_trained(result, run)


# -- two peers ------------------------------------------------------------------------------------

TEXTS = lines([{"text": f"the {word} fox is a fox and no {word} dog"} for word in ("red", "old", "big") * 50])
OTHER_TEXTS = TEXTS.replace("red", "tan")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_peer(folder: Path, tiny_recipe: Callable[..., Path], **changes: Any) -> Path:
    """Write a recipe that does not end, and this peer's own copies of its model and its data beside it."""
    write_llama(folder / "model")
    (folder / "rows.jsonl").write_text(TEXTS)
    return tiny_recipe(
        folder,
        **{
            "model": {"model_name_or_path": "./model"},
            "data": {"datasets": [{"path": "rows.jsonl"}]},
            "peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            "training__max_steps": 100_000,
            "hivemind_config__opt__target_batch_size": 64,
            **changes,
        },
    )


BRING = ("--set", "model.model_name_or_path=./model", "--set", "data.datasets.0.path=rows.jsonl")


@pytest.fixture(scope="class")
def begun(request: pytest.FixtureRequest, open_workplace: Any, tiny_recipe: Any) -> Iterator[Any]:
    """A peer that trains the recipe of the class, alone."""
    with open_workplace("begun") as place:
        peer = place.start("init", write_peer(place.folder, tiny_recipe, **request.cls.sections))
        peer.wait_for("step", 60)
        yield peer
        assert peer.is_running, peer.err
        assert not peer.noise


@pytest.fixture
def undisturbed(begun: Any) -> Iterator[Any]:
    """The peer that has begun; it must not notice this test, and train on, alone and without a warning."""
    before = len(begun.events)
    yield begun
    reached = begun.events[-1].get("step", 0)
    begun.wait_for("step", 30, step=lambda step: step > reached)
    since = begun.events[before:]
    assert {event["event"] for event in since} == {"step"}, since
    assert all(event["peers"] == 1 and event["round"] is None for event in since), since


class TestAnotherCopy:
    """What a recipe names and cannot know: the folder of the same name holds something else."""

    sections: dict[str, Any] = {}

    def test_other_weights_and_tokens_are_refused(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        recipe = write_peer(tmp_path, tiny_recipe)
        write_llama(tmp_path / "model", seed=1, chat_template=CHATML_MARKED)
        result = trahiv("join", recipe, *RUN, "--peer", undisturbed.address)
        error = require_refused(result, 5, "its frozen weights and tokenizer differ", "same `model.revision`")
        assert error["code"] == "mismatch"
        assert [part for part, _, _ in error["differences"]] == ["frozen weights", "tokenizer"]
        assert all(ours != theirs for _, ours, theirs in error["differences"])
        require_nothing_trained(result, tmp_path / "run", had_invited=True)


class TestAnotherPeer:
    """Newcomers to a run with a base in 4 bits: with another recipe, other files, none, and good copies."""

    sections = NF4

    def test_another_recipe_is_refused_field_by_field(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        changes = {
            "model__revision": "step-1000",
            "model__tokenizer_name_or_path": "builtin/bytes",
            "peft": {"r": 8, "target_modules": ["q_proj", "k_proj"]},
        }
        recipe = write_peer(tmp_path, tiny_recipe, **self.sections, **changes)
        (tmp_path / "rows.jsonl").write_text(OTHER_TEXTS)
        result = trahiv("join", recipe, *JSON, "--peer", undisturbed.address)
        error = require_refused(result, 5, "trains another recipe: it differs in 5", "join without RECIPE")
        assert error["differences"] == [
            ["data.datasets.0.content.sha256", sha256(OTHER_TEXTS), sha256(TEXTS)],
            ["model.revision", "step-1000", "main"],
            ["model.tokenizer_name_or_path", "builtin/bytes", None],
            ["peft.r", 8, 4],
            ["peft.target_modules", ["q_proj", "k_proj"], ["q_proj", "v_proj"]],
        ]

    def test_one_other_number_in_4_bits_is_refused(self, trahiv, tmp_path, tiny_recipe, undisturbed):
        recipe = write_peer(tmp_path, tiny_recipe, **self.sections)
        weights = load_file(tmp_path / "model" / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
        save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        result = trahiv("join", recipe, *RUN, "--peer", undisturbed.address)
        error = require_refused(result, 5, "its frozen weights differ. Nothing was averaged", "a fresh copy")
        assert [part for part, _, _ in error["differences"]] == ["frozen weights"]
        require_nothing_trained(result, tmp_path / "run", had_invited=True)

    def test_another_file_of_the_same_name_is_refused(self, trahiv, tmp_path, undisturbed):
        (tmp_path / "rows.jsonl").write_text(OTHER_TEXTS)
        result = trahiv("join", *JSON, "--peer", undisturbed.address, "--yes", *BRING)
        ours, theirs = sha256(OTHER_TEXTS), sha256(TEXTS)
        said = f"/rows.jsonl' is not .* SHA-256 {ours[:12]}; the run has .* SHA-256 {theirs[:12]}"
        error = require_refused(result, 5, said, "copy of the starter's; `--files DIR`")
        assert error["differences"] == [["data.datasets.0.content.sha256", ours, theirs]]

    def test_who_brings_nothing_is_told_what_to_bring(self, trahiv, undisturbed):
        result = trahiv("join", *JSON, "--peer", undisturbed.address, "--yes")
        assert (result.code, result.left) == (2, ())
        hints = {error["path"]: error["hint"] for error in result.errors}
        assert hints.keys() == {"model.model_name_or_path", "data.datasets.0.path"}
        assert "its own folder `model`: bring a copy" in hints["model.model_name_or_path"]
        data = f"its own `rows.jsonl` (1 file, {len(TEXTS)} bytes, SHA-256 {sha256(TEXTS)[:12]})"
        assert f"{data}: bring a copy, and name the folder" in hints["data.datasets.0.path"]

    def test_good_copies_elsewhere_and_under_another_name_are_welcome(self, start, tmp_path, begun):
        write_llama(tmp_path / "models" / "model")
        (tmp_path / "mine.jsonl").write_text(TEXTS)
        peer = start(
            *("join", "--peer", begun.address, "--host-maddr", "/ip4/127.0.0.1/tcp/0", "--yes"),
            *("--set", "model.model_name_or_path=models/model", "--set", "data.datasets.0.path=mine.jsonl"),
        )
        assert peer.wait_for("joined", 60)["source"] == "swarm"
        for each in (peer, begun):
            together = each.wait_for("step", 60, peers=2, round=lambda it: it and len(it["group"]) == 2)
            assert together["round"]["committed"]
        assert not peer.noise
