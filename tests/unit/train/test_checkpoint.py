"""Checkpoints: complete or absent, of this model and this optimizer, bit for bit."""

import copy
import json
import os
import random
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.utils.nested import nested_flatten
from transformers import get_scheduler

from tests.unit.conftest import refused
from tests.unit.step.test_build import OPTIMIZERS
from trahiv_cli.errors import AssetError
from trahiv_cli.progress.committed import Committed, CommittedCell, StateLock
from trahiv_cli.progress.history import DIGEST_BYTES, History
from trahiv_cli.progress.ledger import Ledger, Spans
from trahiv_cli.progress.pace import DEFAULT_PACE, Pace
from trahiv_cli.progress.scores import Scores
from trahiv_cli.rounds.buffers import Buffers
from trahiv_cli.state.inner_optimizer import initialize_state
from trahiv_cli.state.outer import OuterState
from trahiv_cli.state.scored import BestWeights
from trahiv_cli.step.local_steps import LocalSteps
from trahiv_cli.step.method import OwnSteps
from trahiv_cli.train import checkpoint
from trahiv_cli.train.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    OWN_STEPS,
    STATE_FILE,
    WEIGHTS,
    Checkpoint,
    CheckpointData,
    Checkpoints,
    set_random_states,
)

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def network(width=64):
    """Make two trained layers, one of them large enough to be quantized, and a frozen one."""
    torch.manual_seed(0)
    frozen = torch.nn.Linear(2, 1).requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 2, bias=False), frozen)


def at(step, branch=b"?"):
    """Make a history of `step` steps; another `branch` is another history."""
    return History(step, 10 * step, branch * DIGEST_BYTES)


class Peer:
    """A model and its checkpoints; it stands for the swarm's optimizer and its averager."""

    ledger = Ledger()
    pace = DEFAULT_PACE
    own_steps = OwnSteps()
    agreed_values = {}
    outer = None
    best = None

    def __init__(self, folder, name="adamw_torch", model=None, **keywords):
        self.committed = CommittedCell(Committed())
        self.model = model or network()
        self.weights = [param for param in self.model.parameters() if param.requires_grad]
        self.buffers = Buffers(self.model)
        self.lock_state = StateLock()
        self.state_averager = self
        decays = {"params": self.weights[:1], "weight_decay": 0.1}
        self.opt = OPTIMIZERS[name]([decays, {"params": self.weights[1:], "weight_decay": 0.0}])
        initialize_state(self.opt)
        if self.opt.defaults["lr"] is not None:
            # It adds `initial_lr`.
            get_scheduler("cosine", self.opt, num_warmup_steps=0, num_training_steps=9)
        self.store = Checkpoints(folder, **keywords)

    def train(self, *seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            self.opt.step()

    def data(self, step, branch=b"?", **changes):
        vars(self).update(changes)
        self.history = at(step, branch)
        return CheckpointData.of(self.model, self)

    def save(self, *args, **changes):
        return self.store.save(self.data(*args, **changes))

    def load(self):
        newest = self.store.newest()
        newest.load_weights(self.model)
        newest.load_optimizer(self.opt)
        return self

    @property
    def bits(self):
        """All weights, and all tensors, numbers and names in the optimizer's state, comparable."""
        flat = [*self.model.parameters(), *nested_flatten(self.opt.state_dict())]
        values = [(str(one.dtype), one.tolist()) if isinstance(one, torch.Tensor) else one for one in flat]
        return values, [list(state) for state in self.opt.state.values()]


@pytest.fixture
def peer(tmp_path):
    return Peer(tmp_path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_equals_uninterrupted_training(tmp_path, name):
    peer = Peer(tmp_path, name)
    peer.train(0, 1, 2)
    peer.save(3)
    again = Peer(tmp_path, name).load()
    assert again.bits == peer.bits
    for one in (again, peer):
        one.train(100, 101, 102)
    assert again.bits == peer.bits


def test_checkpoint_of_another_base_is_refused(tmp_path):
    Peer(tmp_path, base={"tokenizer": "a", "frozen weights": "b"}).save(3)
    assert Checkpoints(tmp_path).newest().step == 3
    with refused("another tokenizer", "another --output-dir", AssetError):
        Checkpoints(tmp_path, base={"tokenizer": "c", "frozen weights": "b"}).newest()


def test_checkpoint_without_a_base_is_loaded(tmp_path):
    """As earlier versions wrote it."""
    peer = Peer(tmp_path)
    peer.save(3)
    manifest = tmp_path / "step-3" / MANIFEST
    written = json.loads(manifest.read_text())
    del written["base"]
    manifest.write_text(json.dumps(written))
    assert Checkpoints(tmp_path, base={"tokenizer": "c"}).newest().step == 3


def test_random_states_are_restored(peer):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    draw()  # numpy keeps a second normal number for the next call
    peer.save(1)
    drawn = draw()
    set_random_states(peer.store.newest().state.random)
    assert draw() == drawn


def test_pace_and_ledger_are_restored(peer):
    chosen = {"pace": Pace("diloco", local_steps=20), "ledger": Ledger().extend([Spans.of_positions([3])])}
    peer.save(1, **chosen)
    assert vars(peer.store.newest().state).items() >= chosen.items()


def test_outer_state_is_restored_in_same_model(peer):
    outer, again, of_another = (
        OuterState(weights, 0.7, 0.9) for weights in (peer.weights, peer.weights, peer.weights[:1])
    )
    outer.resume([torch.full_like(weight, 2.0) for weight in peer.weights], 5)
    peer.save(1, outer=outer)
    newest = peer.store.newest()
    newest.load_outer(again)
    assert again.rounds == 5
    assert all(map(torch.equal, again.momentum, outer.momentum))
    with pytest.raises(AssetError, match="of another model"):
        newest.load_outer(of_another)
    assert of_another.rounds == 0


def test_scores_and_best_weights_are_restored(tmp_path):
    peer, again, of_another = (Peer(tmp_path) for _ in range(3))
    for one in (peer, again, of_another):
        one.best = BestWeights("lowest")
    of_another.weights = peer.weights[:1]
    scores = Scores(((2, 0.5), (4, 0.25)))
    peer.committed.change(scores=scores)
    peer.best.judge(scores, peer.weights)
    peer.train(1)
    peer.save(6)
    newest = peer.store.newest()
    newest.load_scores(again)
    assert again.committed.now.scores == scores
    assert all(map(torch.equal, again.best.tensors, peer.best.tensors))
    assert again.best.digest == peer.best.digest
    assert not torch.equal(again.best.tensors[0], peer.weights[0])
    with pytest.raises(AssetError, match="of another model"):
        newest.load_scores(of_another)
    assert of_another.committed.now.scores == Scores()


class ResumingSteps(LocalSteps):
    """Local steps that resume from any own steps."""

    resumed = None

    def __init__(self):
        """Take part in no swarm."""

    def resume(self, own):
        self.resumed = own
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agreed_and_own_buffers_are_restored(tmp_path, dtype):
    layers = torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)
    model = torch.nn.Sequential(*layers).to(dtype)
    peer, again = (Peer(tmp_path, model=copy.deepcopy(model)) for _ in range(2))
    peer.buffers.exchanged[0].fill_(2.3)
    peer.buffers.apply(keeps_own=False)
    agreed = [one.clone() for one in peer.model.buffers()]
    with torch.no_grad():
        peer.model(torch.ones(3, 4, dtype=dtype))
    peer.save(1, agreed_values=peer.buffers.agreed, own_steps=OwnSteps((30.0,), 8))
    again.load()
    assert all(map(torch.equal, again.model.buffers(), agreed))
    assert all(map(torch.equal, Buffers(again.model).common, peer.buffers.common)), "peers agree on them"
    again.position = SimpleNamespace(method=ResumingSteps())
    again.store.newest().load_own_steps(again)
    assert all(map(torch.equal, again.model.buffers(), peer.model.buffers()))


def test_own_steps_of_another_model_are_refused(peer):
    peer.save(1, own_steps=OwnSteps((30.0,), 8))
    peer.weights = [torch.zeros(5)]
    peer.position = SimpleNamespace(method=ResumingSteps())
    with pytest.raises(AssetError, match="another model"):
        peer.store.newest().load_own_steps(peer)
    assert peer.position.method.resumed is None


def test_checkpoint_holds_only_trained_weights(tmp_path):
    path = Peer(tmp_path).save(3)
    assert {entry.name for entry in path.iterdir()} == {WEIGHTS, OPTIMIZER, STATE_FILE, MANIFEST}
    assert checkpoint.load_file(path / WEIGHTS).keys() == {"0.weight", "0.bias", "1.weight"}


def test_only_another_history_replaces_checkpoint(peer, tmp_path):
    peer.save(3)
    before = peer.bits
    peer.train(7)
    for branch, expected in ((b"?", before), (b"!", peer.bits)):
        peer.save(3, branch)
        assert Peer(tmp_path).load().bits == expected
    assert peer.store.newest().state.history == at(3, b"!")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]


def test_only_more_own_steps_replace_checkpoint(peer):
    for seed, samples, is_replaced in ((1, 8, True), (2, 16, True), (3, 16, False)):
        peer.train(seed)
        peer.save(3, own_steps=OwnSteps((8.0,), samples))
        newest = peer.store.newest()
        assert newest.state.own_steps.samples == samples
        assert torch.equal(checkpoint.load_file(newest.path / OWN_STEPS)["0"], peer.weights[0]) is is_replaced


@pytest.mark.parametrize(("keep", "left"), [(None, [9, 60]), (1, [60]), (2, [9, 60])])
def test_checkpoints_of_abandoned_history_are_deleted(peer, tmp_path, keep, left):
    for step in (9, 80, 100):
        peer.save(step, b"a")
    store = Checkpoints(tmp_path, keep)
    store.save(peer.data(60, b"s"))
    assert [found.step for found in store.all()] == left


def test_half_written_checkpoints_are_ignored(peer, tmp_path):
    assert peer.store.newest() is None
    peer.save(3)
    (tmp_path / "step-8").mkdir()
    (tmp_path / f".step-9.{os.getpid()}").mkdir()  # of a killed process that had the same id
    (tmp_path / "step-10").write_text("a file")
    assert peer.store.newest() == Checkpoint(tmp_path / "step-3", 3)
    peer.save(9)
    assert [found.step for found in peer.store.all()] == [3, 9]
    assert not list(tmp_path.glob(".step-*"))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        (STATE_FILE, os.remove),
        (OPTIMIZER, lambda path: os.truncate(path, 9)),
        (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")),  # of the same length
    ],
)
def test_damaged_checkpoint_is_skipped_and_replaced(tmp_path, events, told, file, harm):
    peer = Peer(tmp_path, events=events)
    peer.save(3)
    harm(peer.save(4) / file)
    assert peer.store.newest().step == 3
    [warning] = told
    assert warning["code"] == "checkpoint"
    assert "step-4 is passed over: " in warning["message"]
    peer.save(4)
    assert peer.store.newest().step == 4


@pytest.mark.parametrize("model", [network(width=32), network().append(torch.nn.Linear(1, 1))])
def test_weights_of_another_model_are_refused(tmp_path, model):
    Peer(tmp_path).save(3)
    torch.nn.init.zeros_(model[0].weight)
    with pytest.raises(AssetError, match="another model"):
        Peer(tmp_path, model=model).load()
    assert not model[0].weight.any()


@pytest.mark.parametrize("name", ["sgd", "adafactor", "adamw_8bit"])
def test_state_of_another_optimizer_is_refused(tmp_path, name):
    Peer(tmp_path).save(3)
    theirs = Peer(tmp_path, name)
    before = theirs.bits
    with pytest.raises(AssetError, match="another optimizer"):
        theirs.load()
    assert theirs.bits == before


def test_unreadable_state_is_refused(peer):
    path = peer.save(3)
    state = json.loads((path / STATE_FILE).read_text())
    without = (state | {name: None} for name in state if name != "version")
    for one in ([], state | {"step": "many"}, state | {"samples": -1}, *without):
        (path / STATE_FILE).write_text(json.dumps(one))
        with refused(r"state.json can't be read", str(path)):
            Checkpoint(path, 3).load_optimizer(peer.opt)


def test_background_save_keeps_only_newest_waiting(tmp_path, events, told):
    began = threading.Event()
    go_on = threading.Event()
    peer = Peer(tmp_path, events=events)
    save = peer.store.save

    def save_slowly(data):
        began.set()
        assert go_on.wait(10)
        return save(data)

    peer.store.save = save_slowly
    for step in (1, 2, 3):
        peer.train(step)
        peer.store.save_beside(peer.data(step))
        assert began.wait(10)
    expected = peer.bits
    peer.train(4)
    go_on.set()
    assert peer.store.finish() == peer.store.finish() == tmp_path / "step-3"
    assert [(event["event"], event["step"]) for event in told] == [("checkpoint", 1), ("checkpoint", 3)]
    assert Peer(tmp_path).load().bits == expected


def full(_, path=None):
    if path is None:
        raise OSError(28, "No space left on device")
    path.write_bytes(b"half")
    raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("full_at", [(checkpoint, "save_file", full), (os, "fsync", full)])
@pytest.mark.parametrize(("step", "branch"), [(3, b"!"), (4, b"?")])
def test_full_disk_keeps_older_checkpoint(tmp_path, monkeypatch, events, told, full_at, step, branch):
    peer = Peer(tmp_path, keep=1, events=events)
    peer.save(3)
    with monkeypatch.context() as context:
        context.setattr(*full_at)
        peer.store.save_beside(peer.data(step, branch))
        assert peer.store.finish() is None
    [warning] = told
    assert warning["code"] == "checkpoint"
    assert re.search(rf"step {step}: .*No space left", warning["message"])
    assert warning["hint"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]
    assert peer.store.newest().state.history == at(3)
    peer.store.save_beside(peer.data(4))  # the next save is tried again
    assert peer.store.finish() == tmp_path / "step-4"
