"""What a peer contributes to a round, what it keeps meanwhile, and what the round does to its weights.

Numbers are powers of two and the inner learning rate is 1, so expected values are exact.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.kit import stepping
from tests.kit.stepping import sgd
from trahiv_cli.progress.pace import Pace
from trahiv_cli.state.outer import OuterState
from trahiv_cli.step import method as methods
from trahiv_cli.step.method import NORM_VALUES, OwnSteps

torch.set_num_threads(1)

DILOCO = Pace(mode="diloco", local_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)
STREAMING = Pace(mode="streaming", local_steps=4, fragments=2, outer_learning_rate=1.0, outer_momentum=0.0)
"""Each round takes two steps of the swarm and exchanges one of two fragments."""

LAYOUTS = torch.contiguous_format, torch.channels_last
SYNC = Pace()
OVERLAP = Pace(mode="overlap")
ADAPTIVE = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
}


def of(*paces):
    return pytest.mark.parametrize("pace", paces, ids=lambda pace: pace.mode)


class Peer(stepping.Peer):
    """A peer with two zero weights, by default of two values, whose rounds a test begins and ends."""

    def __init__(self, pace, *, norm=0.0, make=sgd, shape=(2,), layout=torch.preserve_format, **settings):
        zeros = torch.zeros(shape)
        self.weights = [torch.nn.Parameter(zeros.clone(memory_format=layout)) for _ in range(2)]
        super().__init__(self.weights, make, pace=pace, max_grad_norm=norm, **settings)
        self.method = self.position.method
        self._goes_on = pace.is_background

    def set_aside(self):
        """Begin a round; return its samples and weight, or None if there is nothing to contribute."""
        if self.method.set_aside(goes_on=self._goes_on):
            return self.method.samples_aside, self.method.weight_aside
        return None

    def train(self, gradient=1.0, samples=8, num_batches=1):
        """Account for batches whose gradients all have one value."""
        for _ in range(num_batches):
            for weight in self.weights:
                weight.grad = torch.full_like(weight, gradient)
            self.method.account(samples)
            for weight in self.weights:
                weight.grad = None

    values = property(lambda self: [one for weight in self.weights for one in weight.unique().tolist()])
    """The value of each weight, which is the same at all positions; `anchors` likewise for agreed weights."""
    anchors = property(lambda self: [one.flatten()[0].item() for one in self.method.outer.anchor])
    samples = property(lambda self: (self.method.samples_held, self.method.samples_aside))

    @property
    def exchanged(self):
        """The tensors that the next round averages."""
        return [self.gradients.averages.tensors[place] for place in self.method.places]

    def contribution(self):
        """Return this peer's contribution, one value per exchanged tensor."""
        self.method.load()
        return [tensor.flatten()[0].item() for tensor in self.exchanged]

    def end_with(self, average, *, is_followed=False, is_empty=False):
        """Commit a round with this average: this peer's own, or one of others with `is_followed`."""
        for tensor in self.exchanged:
            tensor.copy_(torch.as_tensor(average))
        end = self.method.follow if is_followed else self.method.apply
        end(is_empty=is_empty)


def test_nonfinite_batch_takes_no_step():
    peer = Peer(DILOCO)
    peer.train()
    for number, poison in enumerate((math.nan, math.inf, -math.inf), start=1):
        peer.train(gradient=poison, samples=4)
        peer.train(samples=4)
        assert peer.values == [-1.0, -1.0]
        assert (peer.method.dropped_samples, peer.method.samples_held) == (8 * number, 8)
    peer.train()
    assert peer.values == [-2.0, -2.0]
    assert peer.set_aside() == (16, 16.0)
    peer.method.take_back()
    with torch.no_grad():
        peer.weights[0][0] = torch.inf
    assert peer.set_aside() is None
    assert peer.method.dropped_samples == 24 + 16
    assert peer.values == peer.anchors == [0.0, 0.0]
    assert peer.samples == (0, 0), "nor does such a weight stay"


def test_learning_rate_follows_swarm_samples():
    peer = Peer(DILOCO)
    before = 0.0
    rates = {step: 2.0**-step for step in range(20)}
    peer.state.scheduler = LambdaLR(peer.state.optimizer, rates.get)
    peer.method.begin(8, 1)
    for peer.tracker.samples, step in ((0, 8), (7, 8), (8, 9), (20, 10), (24, 11), (32, 11), (1000, 11)):
        peer.train()
        assert before - peer.values[0] == rates[step], f"{peer.tracker.samples} samples: after step {step}"
        before = peer.values[0]


@of(SYNC, OVERLAP, DILOCO, STREAMING)
@pytest.mark.parametrize("is_followed", [False, True])
def test_empty_round_changes_nothing(pace, is_followed):
    def state():
        outer = peer.method.outer if pace.has_local_steps else None
        return repr(
            [peer.state.optimizer.state_dict(), peer.values, outer and (outer.momentum, outer.anchor)]
        )

    peer = Peer(replace(pace, outer_momentum=0.5), make=ADAPTIVE["adamw"])
    for _ in range(2):
        peer.train()
        peer.set_aside()
        peer.end_with(1.0)
    before = state()
    peer.gradients.expect_batch(8, 0.0, lend=False)
    peer.train(gradient=0.0)
    assert state() == before, "nor does its own step change anything"
    if not is_followed:
        peer.set_aside()
    peer.end_with(0.0, is_followed=is_followed, is_empty=True)
    assert state() == before
    if pace.has_local_steps:
        assert peer.method.outer.rounds == 3, "the next fragment is due"
    else:
        assert peer.samples == (0, 0)
        assert peer.method.last_grad_norm is None


@of(DILOCO, STREAMING)
def test_pseudogradient_survives_failed_round(pace):
    peer = Peer(pace)
    peer.train(num_batches=3)
    peer.set_aside()
    peer.train(num_batches=2)
    for _ in range(2):  # a round may be tried more than once
        assert set(peer.contribution()) == {3.0}
        peer.exchanged[0].fill_(math.nan)  # a round may leave anything there
    peer.method.take_back()
    assert peer.values == [-5.0, -5.0]
    assert peer.anchors == [0.0, 0.0]
    assert peer.method.outer.rounds == peer.method.weight_aside == 0
    for _ in range(2):
        assert peer.samples == (40, 0)
        assert peer.set_aside() == (40, 40.0)
        assert set(peer.contribution()) == {5.0}
        peer.method.take_back()


@pytest.mark.parametrize("shape", [(2,), ()], ids=["values", "without dimensions"])
def test_streaming_contributes_each_movement_once(shape):
    peer = Peer(STREAMING, shape=shape)
    brought = [0.0, 0.0]
    counted = []
    for count in range(6):
        peer.method.begin(2 * count, 1)
        [place] = peer.method.places
        assert place == count % 2, "fragments are exchanged in turn"
        anchor, momentum = peer.method.held_in_common()
        assert anchor is peer.method.outer.anchor[place]
        assert momentum is peer.method.outer.momentum[place]
        peer.train()
        counted.append(peer.set_aside())
        peer.train(gradient=2.0)
        [contribution] = peer.contribution()
        brought[place] += contribution
        peer.end_with(contribution)
    trained = [-value for value in peer.values]
    assert trained == [18.0, 18.0], "alone it goes where its own steps lead"
    assert brought == [-value for value in peer.anchors] == [13.0, 16.0], "and the rest comes next"
    assert counted == [(8, 8), (16, 24), *[(16, 32)] * 4], "it counts by what its fragment was trained since"
    assert peer.method.outer.rounds == 6


def test_partial_batch_is_held_until_reset():
    peer = Peer(DILOCO)
    peer.train(samples=4)
    assert peer.set_aside() == (0, 0.0)
    assert peer.contribution() == [0.0, 0.0]
    peer.end_with(2.0)
    assert peer.values == [-2.0, -2.0]
    assert peer.samples == (4, 0)
    peer.train(samples=4)
    assert peer.values == [-3.0, -3.0], "its gradients are kept"
    peer.train(samples=3)
    assert peer.set_aside() == (8, 8.0)
    assert peer.samples == (11, 8)
    peer.method.reset()
    peer.train(samples=4)
    assert peer.samples == (4, 0)
    assert peer.values == [-3.0, -3.0], "they were for other weights"


@pytest.mark.parametrize(
    ("pace", "max_steps", "rounds"),
    [
        *[(DILOCO, 8, [4, 4]), (DILOCO, 10, [4, 4, 2]), (STREAMING, 7, [2, 2, 2, 1]), (STREAMING, 1, [1])],
        *[(replace(STREAMING, local_steps=5), 7, [3, 3, 1]), (replace(STREAMING, local_steps=1), 2, [1, 1])],
    ],
)
def test_last_round_exchanges_all_fragments(pace, max_steps, rounds):
    peer = Peer(pace, max_steps=max_steps)
    step = 0
    committed = []
    while step < max_steps:
        peer.method.begin(step, 1)
        committed.append(peer.method.steps)
        step += peer.method.steps
        peer.train(num_batches=peer.method.steps)
        peer.set_aside()
        peer.train()
        if step == max_steps:
            assert peer.method.places == range(2)
        peer.end_with(1.0)
    assert committed == rounds
    assert step == max_steps
    assert peer.values == peer.anchors, "what was trained during the last round is nobody's any more"


@of(DILOCO, STREAMING)
def test_own_steps_survive_restart(pace):
    peer = Peer(pace)
    peer.train(num_batches=2)
    other = Peer(pace)
    assert other.method.resume(peer.method.own_steps)
    assert other.set_aside() == peer.set_aside() == (16, 16.0)
    assert not other.method.resume(OwnSteps((1.0,) * 7, 1)), "they are of other fragments"
    assert other.method.own_steps == peer.method.own_steps, "also of a round that runs"
    other.method.take_back()
    other.method.set_pace(Pace("streaming", local_steps=4, fragments=1))
    assert other.method.own_steps == OwnSteps((16.0,), 16)


def drawn(seed):
    """Return random tensors of several shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((31, 7), (13,), (1,), ())]


def test_outer_steps_match_torch():
    outer = OuterState(drawn(0), 0.7, 0.9)
    weights = list(map(torch.nn.Parameter, drawn(0)))
    theirs = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 9):
        gradients = drawn(step)
        places = range(1, 3) if step % 2 else range(4)
        for place, weight in enumerate(weights):
            weight.grad = gradients[place] if place in places else None
        theirs.step()
        outer.step(places, gradients)
        assert all(map(torch.equal, gradients, drawn(step))), "what was given is not written to"
        torch.testing.assert_close(outer.anchor, [one.detach() for one in weights], rtol=1e-6, atol=1e-6)
        momenta = [theirs.state[weight].get("momentum_buffer", torch.zeros(())) for weight in weights]
        for ours, momentum in zip(outer.momentum, momenta, strict=True):
            torch.testing.assert_close(ours, momentum.expand_as(ours), rtol=1e-6, atol=1e-6)
    assert outer.rounds == 8


@of(SYNC, OVERLAP, DILOCO, STREAMING)
def test_memory_layout_leaves_results_unchanged(pace):
    average = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    peers = [Peer(pace, shape=(2, 3, 2, 2), layout=layout) for layout in LAYOUTS]
    brought = []
    for peer in peers:
        with torch.no_grad():
            for weight in peer.weights:
                weight.copy_(average * 3)
        peer.train(samples=16)
        assert peer.set_aside()
        peer.method.load()
        brought.append([tensor.clone() for tensor in peer.exchanged])
        peer.end_with(average)
    assert all(map(torch.equal, *brought))
    assert all(map(torch.equal, *(peer.weights for peer in peers)))


@pytest.mark.parametrize(("norm", "threads"), [(0.5, 1), (0.5, 3), (100.0, 1), (0.0, 1)])
@of(SYNC, OVERLAP)
def test_clipping_is_bit_exact(pace, norm, threads):
    """It follows from IEEE 754 alone, so any device and any number of threads gives the same bits."""
    torch.manual_seed(0)
    average = torch.randn(2 * NORM_VALUES + 7)
    peer = Peer(pace, norm=norm, shape=average.shape)
    torch.set_num_threads(threads)
    peer.train()
    peer.set_aside()
    peer.end_with(average)
    torch.set_num_threads(1)
    total = np.float32(math.sqrt(2 * math.fsum(value * value for value in average.tolist())))
    scale = min(np.float32(1.0), np.float32(1.0) / (total + np.float32(1e-6)) * np.float32(norm or math.inf))
    assert peer.method.last_grad_norm == total
    assert all(np.array_equal(-weight.detach().numpy(), average.numpy() * scale) for weight in peer.weights)


@of(SYNC, OVERLAP)
def test_followed_round_drops_older_gradients(pace):
    peer = Peer(pace)
    peer.train(gradient=4.0)
    assert peer.set_aside() == (8, 8.0)
    assert peer.values == ([-4.0, -4.0] if pace.is_background else [0.0, 0.0]), (
        "where its gradient would move it"
    )
    peer.train(gradient=6.0)
    peer.end_with(0.5)
    assert peer.values == [-0.5, -0.5]
    assert peer.samples == (8, 0)
    assert peer.set_aside()
    assert peer.contribution() == [6.0, 6.0]
    peer.method.take_back()
    peer.end_with(0.5, is_followed=True)
    assert peer.values == [-1.0, -1.0]
    assert peer.samples == (0, 0), "that was of older weights"
    peer.train(gradient=2.0)
    assert peer.set_aside() == (8, 8.0)
    assert peer.contribution() == [2.0, 2.0]


@of(DILOCO, STREAMING)
def test_follower_keeps_own_steps_until_end(pace):
    follower = Peer(pace, max_steps=2 * pace.steps_per_round)
    follower.train(gradient=2.0)
    follower.end_with(0.25, is_followed=True)
    assert follower.anchors[0] == -0.25
    assert follower.values == [-2.0 + anchor for anchor in follower.anchors]
    follower.method.begin(pace.steps_per_round, 1)
    assert follower.set_aside() == (8, 8.0 * (2 if pace is STREAMING else 1))
    assert follower.contribution() == [2.0] * len(follower.method.places)
    follower.method.take_back()
    follower.end_with(0.25, is_followed=True)
    assert follower.values == follower.anchors, "at the end all hold what is agreed on"


@pytest.mark.parametrize("name", ADAPTIVE)
def test_failed_guess_restores_optimizer(name, monkeypatch):
    peer = Peer(OVERLAP, make=ADAPTIVE[name])
    peer.train()
    inner = peer.state.optimizer
    step = inner.step
    before = copy.deepcopy(inner.state_dict())

    def runs_out():
        step()
        raise torch.OutOfMemoryError

    monkeypatch.setattr(inner, "step", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        peer.set_aside()
    torch.testing.assert_close(inner.state_dict(), before, rtol=0, atol=0)
    assert [agreed.tolist() for agreed in peer.state.agreed] == [[0.0, 0.0]] * 2
    assert not peer.state.lock_state.is_torn


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_guess_leaves_no_trace(name, lend, num_batches, monkeypatch):
    """A peer that trained during its rounds equals one that waited, bit for bit."""
    monkeypatch.setattr(methods, "GUESS_BYTES", 2**21 // num_batches)
    waited, ahead = (Peer(pace, make=ADAPTIVE[name], shape=(2**16, 2)) for pace in (SYNC, OVERLAP))
    for peer in (waited, ahead):
        torch.manual_seed(0)
        for _ in range(4):
            peer.gradients.expect_batch(8, 8, lend=lend)
            sum((weight * torch.randn(weight.shape)).sum() for weight in peer.weights).backward()
            peer.method.account(8)
            peer.set_aside()  # without lending, the gradients of the batch are still there
            peer.method.load()
            for average in peer.exchanged:
                average.add_(torch.randn(average.shape))
            peer.method.apply()
            for weight in peer.weights:
                weight.grad = None
    assert all(map(torch.equal, waited.weights, ahead.weights))
    states = [peer.state.optimizer.state_dict() for peer in (waited, ahead)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
