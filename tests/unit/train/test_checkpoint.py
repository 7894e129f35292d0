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
from trahiv_cli.optim.history import DIGEST_BYTES, History
from trahiv_cli.optim.inner import initialize_state
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.local_steps import OuterState
from trahiv_cli.optim.pace import DEFAULT_PACE, Pace
from trahiv_cli.telemetry.events import Events
from trahiv_cli.train import checkpoint
from trahiv_cli.train.checkpoint import (
    MANIFEST,
    OPTIMIZER,
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
    """A history of so many steps; another `branch` is another one."""
    return History(step, 10 * step, branch * DIGEST_BYTES)


def data_of(a_model, optimizer, history, outer=None, **swarm):
    """What is saved of a swarm's optimizer that is only these values."""
    usual = {"ledger": Ledger(), "pace": DEFAULT_PACE, "agreed_values": {}, "own_steps": []}
    averager = SimpleNamespace(outer=outer)
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
    """Make a model and its optimizer as a checkpoint has them."""
    again = model()
    checkpoint.load_weights(again)
    fresh = optimizer_of(again, name)
    checkpoint.load_optimizer(fresh)
    return again, fresh


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_equals_never_having_stopped(tmp_path, name):
    store, *trained = saved(tmp_path / "checkpoints", name=name)
    again = restored(store.newest(), name)
    names = [[*map(list, optimizer.state.values())] for _, optimizer in (again, trained)]
    assert names[0] == names[1], "nothing beside what the optimizer itself holds"
    assert store.newest().load_own(again[0]) == [] and store.newest().state.history == at(3)
    assert bits(*again) == bits(*trained)
    for one in (again, trained):
        train(*one, range(100, 103))
    assert bits(*again) == bits(*trained)


def test_steps_and_random_numbers_of_a_peer_s_own_are_kept_beside_what_is_agreed_on(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    trained, again, store = model(), model(), Checkpoints(tmp_path)
    params, optimizer = trained_of(trained), optimizer_of(trained)
    outer, fresh, theirs = (OuterState(some, 0.7, 0.9) for some in (params, params, [torch.zeros(3)]))
    outer.resume([torch.full_like(param, 2.0) for param in params], 5)
    chosen = {"pace": Pace("diloco", local_steps=20), "ledger": Ledger().extend([Spans.of_positions([3])])}
    agreed = {param: torch.full_like(param, 7.0) for param in params}
    draw()  # numpy keeps a second normal number for the next call
    own = {"agreed_values": agreed, "own_steps": [0.0, 30.0]}
    store.save(data_of(trained, optimizer, at(1), outer, **own, **chosen))
    drawn, _, newest = draw(), draw(), store.newest()
    set_random_states(newest.state.random)
    assert draw() == drawn
    assert {name: getattr(newest.state, name) for name in chosen} == chosen
    newest.load_weights(again)
    assert all(bool((param == 7.0).all()) for param in trained_of(again))
    assert newest.load_own(again) == [0.0, 30.0] and bits(again, optimizer) == bits(trained, optimizer)
    newest.load_outer(fresh)
    assert fresh.rounds == 5 and all(bool((momentum == 2.0).all()) for momentum in fresh.momentum)
    with pytest.raises(AssetError, match="of another model"):
        newest.load_outer(theirs)
    assert theirs.rounds == 0


def test_a_checkpoint_holds_trained_weights_alone_and_one_of_the_same_history_is_left_as_it_is(tmp_path):
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


def test_half_written_folders_are_no_checkpoints_and_older_ones_are_deleted(tmp_path):
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
def test_a_damaged_checkpoint_is_passed_over_and_said_and_replaced(tmp_path, file, harm):
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
def test_what_is_damaged_or_of_another_model_is_refused_and_nothing_changes(tmp_path, other, name):
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


def test_training_goes_on_while_a_checkpoint_is_written_and_only_the_last_that_waits_is(tmp_path):
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
def test_a_full_disk_is_said_and_leaves_the_older_checkpoint_alone(tmp_path, monkeypatch, full_at):
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
    store.save_beside(data_of(trained, optimizer, at(4)))  # the next one is tried
    assert store.finish() == tmp_path / "step-4"
