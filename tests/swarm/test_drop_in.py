"""The drop-in as its users write it, in a script and in a notebook: only `hivemind_config`."""

import contextlib
import logging
import re
import signal

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    Trainer,
    TrainingArguments,
)

from tests.kit.commands import ORIGINAL, left_by, wait_until
from tests.kit.stand_ins import Blocks, model_of_blocks, write_original
from tests.swarm.conftest import recorded
from trahiv_cli import SwarmTrainerMixin
from trahiv_cli.doctor.report import write_report


class OwnTrainer(SwarmTrainerMixin, Trainer):
    """A user's swarm trainer of any other class, with a loss as transformers documents it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_hivemind_config_is_enough(tmp_path, caplog):
    """Here as a keyword of a user's own trainer; below in the arguments of `SwarmTrainer`."""
    torch.set_num_threads(1)
    config = {"dht": {}, "opt": {"run_id": "spanish_qlora", "target_batch_size": 16, "verbose": True}}
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, warmup_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=["tensorboard"], save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = OwnTrainer(model=model_of_blocks(), args=args, train_dataset=Blocks(), hivemind_config=config)
    before = set(psutil.Process().children(recursive=True))
    with caplog.at_level(logging.WARNING, logger="trahiv_cli"):
        result = trainer.train()
    assert f"To join the training, use initial_peers = ['@{tmp_path}" in caplog.text
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3], "the x axis is the swarm's step"
    assert min(entry["loss"] for entry in logged) > 1
    assert [entry["learning_rate"] for entry in logged] == pytest.approx([0.0, 0.005, 0.01])
    assert (result.global_step, trainer.state.global_step, trainer.state.max_steps) == (3, 3, 3)
    assert trainer.state.num_train_epochs == 1, "12 batches of 4 are less than one pass over 64 samples"
    runtime, steps = (result.metrics[f"train_{name}"] for name in ("runtime", "steps_per_second"))
    assert steps * runtime == pytest.approx(3, rel=0.01)
    left = set(psutil.Process().children(recursive=True)) - before
    assert {child.name() for child in left} <= {"torch_shm_manager"}
    assert args.max_steps == 3, "the user's own arguments are as they were"
    [log] = tmp_path.rglob("events.out.tfevents.*")
    written = EventAccumulator(str(log))
    written.Reload()
    assert [point.step for point in written.Scalars("train/loss")] == [1, 2, 3]
    for name, value in (("samples", 16), ("peers", 1)):  # a tracker gets the swarm's figures, too
        assert [point.value for point in written.Scalars(f"train/swarm/{name}")] == [value] * 3


SCRIPT = """
import multiprocessing, os, sys, time
from tests.kit.stand_ins import Blocks, model_of_blocks
from trahiv_cli import SwarmTrainer, SwarmTrainingArguments

multiprocessing.set_start_method("spawn", force=True)  # as programs do that use CUDA in their workers
output_dir, max_steps, *initial_peers = sys.argv[1:]
config = {"dht": {"initial_peers": initial_peers}, "opt": {"run_id": "spanish", "target_batch_size": 16}}
args = SwarmTrainingArguments(
    output_dir=output_dir, max_steps=int(max_steps), per_device_train_batch_size=4,
    dataloader_pin_memory=False, hivemind_config=config, report_to=[],
)
class Paced(SwarmTrainer):
    def training_step(self, *args, **kwargs):
        time.sleep(0.15)
        return super().training_step(*args, **kwargs)


print("the libraries are loaded", file=sys.stderr)
while not all(os.path.exists(one[1:]) for one in initial_peers):
    time.sleep(0.05)
trainer = Paced(model=model_of_blocks(), args=args, train_dataset=Blocks())
assert trainer.train().global_step == args.max_steps
assert multiprocessing.get_start_method() == "spawn"
"""


def test_good_run_prints_only_join_line(workplace):
    invitation = workplace.folder / "first/invitation"
    first = workplace.start_script(SCRIPT, "first", 40, is_cold=True)
    second = workplace.start_script(SCRIPT, "second", 40, f"@{invitation}", is_cold=True)
    for peer, name in ((first, "first"), (second, "second")):
        assert peer.exit_code(90) == 0
        _, said = peer.err.split("the libraries are loaded\n")
        assert len(said.splitlines()) == 1, said
        file = workplace.folder / name / "invitation"
        assert said.startswith(f"To join the training, use initial_peers = ['@{file}']. On another machine,")
        assert "trahiv1:" not in said
        assert left_by(peer.pid) == []


NORMALIZED = """
import sys, time, torch
from torch import nn
from trahiv_cli import SwarmTrainer, SwarmTrainingArguments

name, *initial_peers = sys.argv[1:]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index)) * 3 + 5
        return {"x": x, "labels": (x.sum() > 40).long()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Waiting(SwarmTrainer):
    first = None

    def training_step(self, model, *args, **kwargs):
        swarm = self.swarm_optimizer
        if self.first is None:
            self.first = swarm.local_epoch, {key: one.clone() for key, one in model.named_buffers()}
        if name == "first":  # until there is one that comes late
            deadline = time.monotonic() + 60
            while swarm.local_epoch == 3 and not swarm.tracker.others and time.monotonic() < deadline:
                swarm.tracker.refresh()
                time.sleep(0.1)
        return super().training_step(model, *args, **kwargs)


config = {"dht": {"initial_peers": initial_peers}, "opt": {"run_id": "norm", "target_batch_size": 16}}
args = SwarmTrainingArguments(
    output_dir=name, max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2,
    dataloader_pin_memory=False, hivemind_config=config, report_to=[],
)
net = Net()
trainer = Waiting(model=net, args=args, train_dataset=Numbers())
trainer.train()
torch.save({"first": trainer.first, "end": net.state_dict()}, f"{name}.pt")
"""


def require_equal(some, others):
    assert some.keys() == others.keys()
    assert all(torch.equal(one, others[name]) for name, one in some.items())


def test_running_statistics_are_shared_and_resumed(workplace):
    def results(name):
        return torch.load(workplace.folder / f"{name}.pt")

    def kept(name):
        return load_file(workplace.folder / name / "checkpoints/step-10/weights.safetensors")

    invitation = workplace.folder / "first/invitation"
    first = workplace.start_script(NORMALIZED, "first")
    wait_until(invitation.exists, seconds=60)
    late = workplace.start_script(NORMALIZED, "late", f"@{invitation}")
    assert [peer.exit_code(90) for peer in (first, late)] == [0, 0]
    late = results("late")
    require_equal(results("first")["end"], late["end"])
    require_equal(kept("first"), kept("late"))
    step, buffers = late["first"]
    assert step >= 3
    assert buffers["layers.1.running_mean"].abs().min() > 0

    again = workplace.start_script(NORMALIZED, "first")
    assert again.exit_code(60) == 0
    step, buffers = results("first")["first"]
    assert step == 10
    assert len(buffers) == 3
    assert all(torch.equal(value.float(), kept("first")[name]) for name, value in buffers.items())


def test_original_example_trains_after_enable(workplace):
    model, quotes = write_original(workplace.folder)
    peer = workplace.start_script(ORIGINAL.read_text(), model, quotes, is_cold=True)
    assert peer.exit_code(120) == 0
    assert "To join the training, use initial_peers = ['@" in peer.err
    losses = re.findall(r"'loss': '?([\d.]+)", peer.out)
    assert len(losses) == 10
    adapters = load_file(workplace.folder / "outputs/checkpoints/step-10/weights.safetensors")
    assert all(weight.any() for name, weight in adapters.items() if "lora_B" in name), "each has moved from 0"


UNLIKE = """
import signal, sys
from tests.kit.stand_ins import Blocks, model_of_blocks
from trahiv_cli import SwarmTrainer, SwarmTrainingArguments

signal.signal(signal.SIGINT, signal.default_int_handler)
output_dir, rate, seed, *initial_peers = sys.argv[1:]
config = {"dht": {"initial_peers": initial_peers}, "opt": {"run_id": "unlike", "target_batch_size": 16}}
args = SwarmTrainingArguments(
    output_dir=output_dir, max_steps=100_000, per_device_train_batch_size=4, learning_rate=float(rate),
    seed=int(seed), dataloader_pin_memory=False, hivemind_config=config, report_to=[], disable_tqdm=True,
)
swarm = {"min_peers": 2}
SwarmTrainer(model=model_of_blocks(), args=args, train_dataset=Blocks(), swarm=swarm, wait_s=1).train()
"""


def test_unlike_drop_in_is_refused_with_table(workplace):
    """The other peer trains on, and `status` and `report` read its folder like that of a command."""
    folder = workplace.folder / "first"
    first = workplace.start_script(UNLIKE, "first", 1e-2, 42, is_cold=True)
    wait_until(lambda: "step" in events_in(folder), 90)
    second = workplace.start_script(UNLIKE, "second", 1e-4, 43, f"@{folder / 'invitation'}", is_cold=True)
    assert second.exit_code(90) == 1
    rows = [line.split() for line in second.err.splitlines() if line.startswith("  learning_rate")]
    assert rows == [["learning_rate", "0.0001", "0.01"]]
    assert re.search(r"seed of the data's order +43 +42", second.err)
    assert "RecipeMismatch: This peer and the swarm do not train the same" in second.err
    assert events_in(workplace.folder / "second")[-1] == "error"
    assert "warning [min-peers]: 1 of 2 peers came in 1 s; training begins." in first.err
    status = workplace.run("status", "--output-dir", "first")
    assert status.code == 0
    assert status.out.startswith("unlike: step ")
    first.press_ctrl_c()
    assert first.exit_code(60) == -signal.SIGINT
    told = events_in(folder)
    assert told[-1] == "done"
    assert {"ready", "joined", "step", "warning", "checkpoint"} <= set(told)
    assert set(write_report(folder, workplace.folder / "report.tar.gz")) == {"events.jsonl", "machine.json"}


def events_in(folder):
    """The names of the events in a run's folder, which need not be there yet."""
    with contextlib.suppress(FileNotFoundError):
        return [event["event"] for event in recorded(folder)]
    return []


NOTEBOOK = """
import json, signal, psutil
from tests.kit.stand_ins import Blocks, model_of_blocks
from trahiv_cli import SwarmTrainer, SwarmTrainingArguments

def say(event, **fields):  # on a line of its own: Ctrl-C may have cut one off that the Trainer printed
    print("\\n" + json.dumps({"v": 1, "event": event, **fields}), flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does, whatever it was started from
config = {"dht": {"initial_peers": []}, "opt": {"run_id": "spanish", "target_batch_size": 8}}
args = SwarmTrainingArguments(
    output_dir="outputs", max_steps=100_000, per_device_train_batch_size=4, logging_steps=1, report_to=[],
    dataloader_pin_memory=False, hivemind_config=config,
)
trainer = SwarmTrainer(model=model_of_blocks(), args=args, train_dataset=Blocks())
for cell in range(3):
    say("cell", number=cell)
    if cell == 2:
        trainer.train()  # nobody catches what Ctrl-C raises
    try:
        trainer.train()
    except KeyboardInterrupt:
        state = trainer.state
        left = [child.name() for child in psutil.Process().children(recursive=True)]
        say(
            "interrupted",
            number=cell,
            first=state.log_history[0]["step"],
            steps=[state.global_step, state.max_steps],
            left=[name for name in left if name != "torch_shm_manager"],
            is_handler_back=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        )
"""


def test_interrupted_notebook_cell_resumes(workplace):
    """A kernel's SIGINT is a KeyboardInterrupt in the cell, and the process lives on; a second one leaves."""
    kernel = workplace.start_script(NOTEBOOK, is_cold=True)
    stops = []
    for cell in range(2):
        interrupt_training(kernel, cell)
        if cell == 1:
            kernel.send_signal(signal.SIGTERM)  # two equal ones would count once before the first is handled
        stops.append(kernel.wait_for("interrupted", 30, number=cell))
        assert stops[cell]["left"] == []
        assert stops[cell]["is_handler_back"]
    stopped, max_steps = stops[0]["steps"]
    assert max_steps == 100_000
    assert (workplace.folder / f"outputs/checkpoints/step-{stopped}").is_dir()
    assert f"Stopped at step {stopped}. `train()` resumes from" in kernel.err
    assert stops[0]["first"] == 1
    assert stops[1]["first"] > stopped
    assert not re.search("Traceback|Task was destroyed", kernel.err)

    interrupt_training(kernel, 2)  # as in a script, which ends with it
    assert kernel.exit_code(30) == -signal.SIGINT
    assert kernel.err.rstrip().endswith("KeyboardInterrupt")
    assert left_by(kernel.pid) == []


def interrupt_training(kernel, cell):
    """Press Ctrl-C in a cell once another loss is logged."""
    kernel.wait_for("cell", 60, number=cell)
    said = len(kernel.noise)
    wait_until(lambda: any("'loss'" in line for line in kernel.noise[said:]), 60)
    kernel.press_ctrl_c()
