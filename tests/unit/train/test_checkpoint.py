"""Checkpoints: complete or absent, of this model and this optimizer, bit for bit."""

import json
import os
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.utils.nested import nested_flatten
from transformers import get_scheduler

from tests.unit.optim.test_assemble import OPTIMIZERS
from trahiv_cli.errors import AssetError
from trahiv_cli.optim.buffers import Buffers
from trahiv_cli.optim.history import DIGEST_BYTES, History
from trahiv_cli.optim.inner import initialize_state
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.local_steps import LocalSteps, OuterState
from trahiv_cli.optim.method import OwnSteps
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.swarm.host_copies import StateLock
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import checkpoint
from trahiv_cli.train.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    OWN,
    STATE,
    WEIGHTS,
    Checkpoint,
    CheckpointData,
    Checkpoints,
    set_random_states,
)

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def model(width=64, dtype=torch.float32):
    """Two trained layers, one of them large enough to be quantized, and a frozen one."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, width), torch.nn.Linear(width, 2, bias=False), torch.nn.Linear(2, 1)
    return torch.nn.Sequential(*layers).to(dtype)[:2].append(layers[2].requires_grad_(False))


def trained_of(a_model):
    return [param for param in a_model.parameters() if param.requires_grad]


def optimizer_of(a_model, name="adamw_torch"):
    trained = trained_of(a_model)
    groups = [{"params": trained[:1], "weight_decay": 0.1}, {"params": trained[1:], "weight_decay": 0.0}]
    optimizer = OPTIMIZERS[name](groups)
    initialize_state(optimizer)
    if optimizer.defaults["lr"] is not None:
        get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=9)  # adds `initial_lr`
    return optimizer


def train(a_model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for param in trained_of(a_model):
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def bits(a_model, optimizer):
    """All weights, and all tensors and numbers of an optimizer's state, comparable."""
    flat = [*a_model.parameters(), *nested_flatten(optimizer.state_dict())]
    return [(str(one.dtype), one.tolist()) if isinstance(one, torch.Tensor) else one for one in flat]


def at(step, branch=b"?"):
    """A history of `step` steps; another `branch` is another history."""
    return History(step, 10 * step, branch * DIGEST_BYTES)


def data_of(a_model, optimizer, history, outer=None, **swarm):
    """The checkpoint data of a swarm's optimizer that is only these values."""
    usual = {"ledger": Ledger(), "pace": DEFAULT_PACE, "agreed_values": {}, "own_steps": OwnSteps()}
    averager = SimpleNamespace(
        outer=outer, lock_state=StateLock(), weights=trained_of(a_model), buffers=Buffers(a_model)
    )
    values = usual | {"opt": optimizer, "history": history, "state_averager": averager} | swarm
    return CheckpointData.of(a_model, SimpleNamespace(**values))


def saved(folder, step=3, name="adamw_torch"):
    """Train for `step` steps and save; return the store, the model and its optimizer."""
    trained = model()
    optimizer = optimizer_of(trained, name)
    train(trained, optimizer, range(step))
    store = Checkpoints(folder)
    store.save(data_of(trained, optimizer, at(step)))
    return store, trained, optimizer


def restored(checkpoint, name="adamw_torch"):
    """Make a model and its optimizer from a checkpoint."""
    again = model()
    checkpoint.load_weights(again)
    fresh = optimizer_of(again, name)
    checkpoint.load_optimizer(fresh)
    return again, fresh


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_equals_uninterrupted_training(tmp_path, name):
    store, *trained = saved(tmp_path / "checkpoints", name=name)
    again = restored(store.newest(), name)
    names = [[*map(list, optimizer.state.values())] for _, optimizer in (again, trained)]
    assert names[0] == names[1], "nothing beside what the optimizer itself holds"
    assert store.newest().state.history == at(3)
    assert bits(*again) == bits(*trained)
    for one in (again, trained):
        train(*one, range(100, 103))
    assert bits(*again) == bits(*trained)


def test_random_and_agreed_state_are_restored(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    trained, again, store = model(), model(), Checkpoints(tmp_path)
    params, optimizer = trained_of(trained), optimizer_of(trained)
    outer, fresh, theirs = (OuterState(some, 0.7, 0.9) for some in (params, params, [torch.zeros(3)]))
    outer.resume([torch.full_like(param, 2.0) for param in params], 5)
    chosen = {"pace": Pace("diloco", local_steps=20), "ledger": Ledger().extend([Spans.of_positions([3])])}
    agreed = {param: torch.full_like(param, 7.0) for param in params}
    draw()  # numpy keeps a second normal number for the next call
    store.save(data_of(trained, optimizer, at(1), outer, agreed_values=agreed, **chosen))
    drawn, _, newest = draw(), draw(), store.newest()
    set_random_states(newest.state.random)
    assert draw() == drawn
    assert {name: getattr(newest.state, name) for name in chosen} == chosen
    newest.load_weights(again)
    assert all(bool((param == 7.0).all()) for param in trained_of(again))
    newest.load_outer(fresh)
    assert fresh.rounds == 5 and all(bool((momentum == 2.0).all()) for momentum in fresh.momentum)
    with pytest.raises(AssetError, match="of another model"):
        newest.load_outer(theirs)
    assert theirs.rounds == 0


class ResumingSteps(LocalSteps):
    """Local steps that resume from any own steps."""

    def __init__(self):
        self.resumed = []

    def resume(self, own):
        self.resumed.append(own)
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agreed_and_own_buffers_are_restored(tmp_path, dtype):
    def normalized():
        return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)).to(dtype)

    trained, again, store = normalized(), normalized(), Checkpoints(tmp_path)
    optimizer = optimizer_of(trained)
    buffers = Buffers(trained)
    buffers.exchanged[0].copy_(torch.tensor([0.1, 2.0, 0.3, 4.0, 5.0]))
    buffers.apply(keeps_own=False)
    agreed = [one.clone() for one in trained.buffers()]
    averager = SimpleNamespace(
        outer=None, lock_state=StateLock(), weights=trained_of(trained), buffers=buffers
    )
    own = {"agreed_values": buffers.agreed, "own_steps": OwnSteps((30.0,), 8), "state_averager": averager}
    with torch.no_grad():
        trained(torch.ones(3, 4, dtype=dtype))
    store.save(data_of(trained, optimizer, at(1), **own))
    newest = store.newest()
    newest.load_weights(again)
    assert all(map(torch.equal, again.buffers(), agreed))
    assert all(map(torch.equal, Buffers(again).common, buffers.common)), "peers agree on them after a resume"
    averager = SimpleNamespace(weights=trained_of(again), buffers=Buffers(again))
    position = SimpleNamespace(method=ResumingSteps())
    newest.load_own_steps(SimpleNamespace(state_averager=averager, position=position))
    assert all(map(torch.equal, again.buffers(), trained.buffers()))
    assert not torch.equal(again[1].running_mean, agreed[0])
    larger = SimpleNamespace(weights=[torch.zeros(5)], buffers=Buffers(again))
    position.method.resumed.clear()
    with pytest.raises(AssetError, match="another model"):
        newest.load_own_steps(SimpleNamespace(state_averager=larger, position=position))
    assert not position.method.resumed and not larger.weights[0].any()


def test_checkpoint_holds_only_trained_weights(tmp_path):
    store, trained, optimizer = saved(tmp_path)
    assert {entry.name for entry in (tmp_path / "step-3").iterdir()} == {WEIGHTS, OPTIMIZER, STATE, MANIFEST}
    assert checkpoint.load_file(tmp_path / "step-3" / WEIGHTS).keys() == {"0.weight", "0.bias", "1.weight"}
    before = [param.clone() for param in trained_of(trained)]
    train(trained, optimizer, [7])
    for history, expected in ((at(3), before), (at(3, branch=b"!"), trained_of(trained))):
        assert store.save(data_of(trained, optimizer, history)) == tmp_path / "step-3"
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]
        half = model(dtype=torch.bfloat16)
        store.newest().load_weights(half)
        pairs = zip(trained_of(half), expected, strict=True)
        assert all(torch.equal(ours, theirs.bfloat16()) for ours, theirs in pairs)
        assert store.newest().state.history == history


def test_more_own_steps_replace_checkpoint(tmp_path):
    trained, store = model(), Checkpoints(tmp_path)
    optimizer = optimizer_of(trained)
    few, many = OwnSteps((8.0,), 8, Spans(((0, 8),))), OwnSteps((16.0,), 16, Spans(((0, 16),)))
    for own in (few, many, many):
        train(trained, optimizer, [own.samples])
        before = store.newest()
        store.save(data_of(trained, optimizer, at(3), own_steps=own))
        newest = store.newest()
        assert newest.state.own_steps == own
        kept = checkpoint.load_file(newest.path / OWN)["0"]
        is_left = before is not None and before.state.own_steps == own
        assert torch.equal(kept, trained_of(trained)[0]) is not is_left


@pytest.mark.parametrize(("keep", "left"), [(None, [20, 60]), (1, [60]), (2, [20, 60])])
def test_checkpoints_of_abandoned_history_are_deleted(tmp_path, keep, left):
    trained, store = model(), Checkpoints(tmp_path, keep)
    optimizer = optimizer_of(trained)
    for step in (20, 80, 100):
        Checkpoints(tmp_path).save(data_of(trained, optimizer, at(step, branch=b"a")))
    store.save(data_of(trained, optimizer, at(60, branch=b"s")))
    assert [found.step for found in store.all()] == left
    assert store.newest().state.history == at(60, branch=b"s")
    store.save(data_of(trained, optimizer, at(70, branch=b"s")))
    assert store.newest().step == 70


def test_half_written_checkpoints_are_ignored(tmp_path):
    assert Checkpoints(tmp_path / "none").newest() is None
    store, trained, optimizer = saved(tmp_path)
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / WEIGHTS).write_bytes((tmp_path / "step-3" / WEIGHTS).read_bytes())
    (tmp_path / f".step-9.{os.getpid()}").mkdir()  # of a killed process that had the same id
    (tmp_path / "step-10").write_text("a file")
    assert store.newest() == Checkpoint(tmp_path / "step-3", 3)
    for keep, step, left in ((None, 9, [3, 9]), (2, 100, [9, 100])):
        Checkpoints(tmp_path, keep).save(data_of(trained, optimizer, at(step)))
        assert [(found.path.name, found.step) for found in store.all()] == [(f"step-{n}", n) for n in left]
    assert not list(tmp_path.glob(".step-*"))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        (WEIGHTS, lambda path: path.unlink()),
        (OPTIMIZER, lambda path: path.write_bytes(path.read_bytes()[:-1])),
        (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")),  # of the same length
        (STATE, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!")),
    ],
)
def test_damaged_checkpoint_is_skipped_and_replaced(tmp_path, file, harm):
    store, trained, optimizer = saved(tmp_path)
    store.save(data_of(trained, optimizer, at(4)))
    harm(tmp_path / "step-4" / file)
    said = []
    assert Checkpoints(tmp_path, events=Events(said.append)).newest().step == 3
    [warning] = said
    assert warning["code"] == "checkpoint" and "step-4 is passed over: " in warning["message"]
    store.save(data_of(trained, optimizer, at(4)))
    assert store.newest().step == 4


@pytest.mark.parametrize("other", [lambda: model(width=32), lambda: model().append(torch.nn.Linear(1, 1))])
@pytest.mark.parametrize("name", ["sgd", "adafactor", "adamw_8bit"])
def test_foreign_checkpoint_changes_nothing(tmp_path, other, name):
    newest, their_model, theirs = saved(tmp_path)[0].newest(), other(), optimizer_of(model(), name)
    before = bits(their_model, theirs)
    with pytest.raises(AssetError, match="another model"):
        newest.load_weights(their_model)
    with pytest.raises(AssetError, match="another optimizer"):
        newest.load_optimizer(theirs)
    state = json.loads((newest.path / STATE).read_text())
    without = (state | {name: None} for name in state if name != "version")
    for one in ([], state | {"step": "many"}, state | {"samples": -1}, *without):
        (newest.path / STATE).write_text(json.dumps(one))
        with pytest.raises(AssetError, match=r"state.json can't be read") as refused:
            Checkpoint(newest.path, 3).load_optimizer(theirs)
    assert str(newest.path) in refused.value.hint and refused.value.exit_code == 3
    assert bits(their_model, theirs) == before


def test_background_save_keeps_only_newest_waiting(tmp_path):
    began, go_on, said = threading.Event(), threading.Event(), []

    class Slow(Checkpoints):
        def save(self, data):
            began.set()
            assert go_on.wait(10)
            return super().save(data)

    store, trained = Slow(tmp_path, events=Events(said.append)), model()
    optimizer = optimizer_of(trained)
    for step in (1, 2, 3):
        train(trained, optimizer, [step])
        store.save_beside(data_of(trained, optimizer, at(step)))
        assert began.wait(10)
    expected = bits(trained, optimizer)
    train(trained, optimizer, range(5))
    go_on.set()
    assert store.finish() == store.finish() == tmp_path / "step-3"
    assert [(event["event"], event["step"]) for event in said] == [("checkpoint", 1), ("checkpoint", 3)]
    assert bits(*restored(store.newest())) == expected


def full(_, path=None):
    if path is None:
        raise OSError(28, "No space left on device")
    path.write_bytes(b"half")
    raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("full_at", [(checkpoint, "save_file", full), (os, "fsync", full)])
def test_full_disk_keeps_older_checkpoint(tmp_path, monkeypatch, full_at):
    (_, trained, optimizer), said = saved(tmp_path), []
    store = Checkpoints(tmp_path, keep=1, events=Events(said.append))
    for history in (at(3, branch=b"!"), at(4)):  # of another history, and newer
        with monkeypatch.context() as context:
            context.setattr(*full_at)
            store.save_beside(data_of(trained, optimizer, history))
            assert store.finish() is None
        assert said[-1]["code"] == "checkpoint" and f"step {history.step}: " in said[-1]["message"]
        assert "No space left" in said[-1]["message"] and said[-1]["hint"]
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]
        assert store.newest().state.history == at(3)
    store.save_beside(data_of(trained, optimizer, at(4)))  # the next save is tried again
    assert store.finish() == tmp_path / "step-4"
