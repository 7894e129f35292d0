"""What a peer brings to a round, what stays with it meanwhile, and what the round does to its weights.

Numbers are powers of two, and the inner learning rate is 1: what is expected is exact.
"""

import math

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.kit.averagers import gradient_averager, state_averager
from trahiv_cli.optim import method as methods
from trahiv_cli.optim.assemble import initialize_state
from trahiv_cli.optim.local_steps import LocalSteps
from trahiv_cli.optim.pace import Pace
from trahiv_cli.optim.method import NORM_VALUES, SharedGradients, norm_of

torch.set_num_threads(1)

DILOCO = Pace(mode="diloco", local_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)
STREAMING = Pace(mode="streaming", local_steps=4, fragments=2, outer_learning_rate=1.0, outer_momentum=0.0)
"""Two steps of the swarm for a round, which exchanges one of two fragments."""

SYNC, OVERLAP = Pace(), Pace(mode="overlap")

LOCAL = {"diloco": DILOCO, "streaming": STREAMING}
SHARED = {"sync": SYNC, "overlap": OVERLAP}


def sgd(weights):
    return torch.optim.SGD(weights, lr=1.0)


class Peer:
    """A method around averagers without processes; two weights of two values, at 0.

    Args:
        rate: factor of the learning rate by step.
    """

    def __init__(self, pace, *, max_steps=1000, norm=0.0, rate=None, make=sgd, shape=(2,)):
        self.weights = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
        self.gradients, inner = gradient_averager(self.weights), make(self.weights)
        schedule = LambdaLR(inner, rate) if rate else None
        self.state = state_averager(inner, self.weights, scheduler=schedule)
        self.swarm = 0  # samples that it holds
        parts = (self.gradients, self.state, norm)
        if pace.has_local_steps:
            self.method = LocalSteps(
                *parts,
                pace=pace,
                max_steps=max_steps,
                target_batch_size=8,
                samples_of_swarm=lambda: self.swarm,
            )
        else:
            self.method = SharedGradients(*parts)
        self.method.begin(0, 1)
        self._goes_on = pace.is_background

    def set_aside(self):
        """Begin a round."""
        return self.method.set_aside(goes_on=self._goes_on)

    def train(self, gradient=1.0, samples=8, num_batches=1):
        """Account for batches, all of whose gradients have one value."""
        for _ in range(num_batches):
            for weight in self.weights:
                weight.grad = torch.full_like(weight, gradient)
            self.method.account(samples)
            for weight in self.weights:
                weight.grad = None

    @property
    def values(self):
        """The value of each weight, which is the same in all places."""
        return [value for weight in self.weights for value in set(weight.detach().flatten().tolist())]

    @property
    def anchors(self):
        return [value for weight in self.method.outer.anchor for value in set(weight.flatten().tolist())]

    def contribution(self):
        """What this peer brings, of the tensors that are exchanged."""
        self.method.load()
        averages = self.gradients._averaged_tensors
        return [averages[place].flatten()[0].item() for place in self.method.places]

    def end_with(self, average):
        """Commit a round with this average."""
        for place in self.method.places:
            self.gradients._averaged_tensors[place].copy_(torch.as_tensor(average))
        self.method.apply()


# -- local steps: training ------------------------------------------------------------------------


def test_a_peer_steps_by_itself_once_it_holds_its_share_of_the_batch():
    peer = Peer(DILOCO)
    peer.method.begin(0, 2)
    peer.train(gradient=1.0, samples=2)
    assert peer.values == [0.0, 0.0] and peer.method.samples_held == 2
    peer.train(gradient=3.0, samples=2)
    assert peer.values == [-2.0, -2.0], "the mean gradient of four samples, half of the batch of eight"
    assert peer.method.last_grad_norm == pytest.approx(4.0)
    peer.train(gradient=4.0, samples=4)
    assert peer.values == [-6.0, -6.0] and peer.method.samples_held == 8


def test_unequal_batches_count_by_what_they_train():
    peer = Peer(DILOCO)
    for gradient, samples, tokens in ((1.0, 2, 8.0), (5.0, 6, 24.0)):
        factor = peer.gradients.expect_batch(samples, tokens, lend=False)
        peer.train(gradient * factor, samples)
    assert peer.values == [-4.0, -4.0] and peer.method.samples_held == 8
    peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (8, 32.0)


def test_a_local_step_is_clipped():
    peer = Peer(DILOCO, norm=1.0)
    peer.train(gradient=10.0)
    assert peer.method.last_grad_norm == 20.0
    assert peer.values == pytest.approx([-0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_batch_whose_gradients_are_not_finite_takes_no_step_and_is_counted(poison):
    peer = Peer(DILOCO)
    peer.train()
    peer.train(gradient=poison, samples=4)
    peer.train(samples=4)
    assert peer.values == [-1.0, -1.0]
    assert (peer.method.dropped_samples, peer.method.samples_held) == (8, 8)
    peer.train()
    assert peer.values == [-2.0, -2.0] and peer.method.samples_held == 16
    peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (16, 16.0)


def test_the_learning_rate_follows_the_samples_of_the_swarm():
    rates = {step: 2.0**-step for step in range(20)}
    peer = Peer(DILOCO, rate=rates.get)
    peer.method.begin(8, 1)
    before = 0.0
    for swarm, step in ((0, 8), (7, 8), (8, 9), (20, 10), (24, 11), (31, 11), (32, 11), (1000, 11)):
        peer.swarm = swarm
        peer.train()
        assert before - peer.values[0] == rates[step], f"{swarm} samples are in the step after {step}"
        before = peer.values[0]


# -- local steps: a round -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LOCAL)
def test_a_peer_brings_by_how_much_it_had_moved_the_weights_when_the_round_began(mode):
    peer = Peer(LOCAL[mode])
    peer.train(num_batches=3)
    assert peer.set_aside()
    peer.train(num_batches=2)
    for _ in range(2):  # a round is tried more than once
        assert set(peer.contribution()) == {3.0}
    assert peer.values == [-5.0, -5.0] and peer.anchors == [0.0, 0.0]


def test_a_round_that_training_waited_for_leaves_the_agreed_weights_bit_for_bit():
    torch.manual_seed(0)
    pace = Pace(mode="diloco", local_steps=4)
    peer = Peer(pace, make=lambda weights: torch.optim.AdamW(weights, lr=0.1), shape=(37,))
    for _ in range(3):
        for _ in range(4):
            for weight in peer.weights:
                weight.grad = torch.randn(37)
            peer.method.account(8)
        peer.set_aside()
        peer.method.load()
        with torch.no_grad():
            for average in peer.gradients._averaged_tensors:
                average.mul_(torch.rand(37))  # the others brought something else
        peer.method.apply()
        assert all(map(torch.equal, peer.weights, peer.method.outer.anchor))
    assert peer.method.outer.rounds == 3


def test_peers_that_trained_on_other_data_agree_after_a_round():
    peers = [Peer(Pace(mode="diloco", local_steps=4)) for _ in range(2)]
    for peer, gradient in zip(peers, (0.3, -0.7), strict=True):
        peer.train(gradient, num_batches=4)
        peer.set_aside()
        peer.method.load()
        peer.end_with(0.1)
    assert peers[0].values == peers[1].values == peers[0].anchors


def test_what_was_trained_during_a_round_stays_on_top_of_what_was_agreed_on():
    peer = Peer(STREAMING)
    peer.train(num_batches=2)
    peer.set_aside()
    peer.train(gradient=4.0)
    peer.end_with(0.5)
    assert peer.anchors == [-0.5, 0.0], "the first of two fragments was exchanged"
    assert peer.values == [-0.5 - 4.0, -2.0 - 4.0]


def test_training_without_a_pause_brings_each_movement_once():
    peer, brought = Peer(STREAMING), [0.0, 0.0]
    for count in range(6):
        peer.method.begin(2 * count, 1)
        peer.train()
        peer.set_aside()
        peer.train(gradient=2.0)
        [contribution] = peer.contribution()
        brought[count % 2] += contribution
        peer.end_with(contribution)
    trained = [-value for value in peer.values]
    assert trained == [18.0, 18.0], "alone it goes where its own steps lead"
    assert brought == [-value for value in peer.anchors] == [13.0, 16.0], "and the rest comes next"


@pytest.mark.parametrize("mode", LOCAL)
def test_a_failed_round_moves_nothing_and_the_next_brings_all(mode):
    peer = Peer(LOCAL[mode])
    peer.train(num_batches=2)
    peer.set_aside()
    peer.train()
    peer.gradients._averaged_tensors[0].fill_(math.nan)  # whatever a round leaves there
    peer.method.take_back()
    assert peer.values == [-3.0, -3.0] and peer.anchors == [0.0, 0.0] and peer.method.outer.rounds == 0
    assert (peer.method.samples_held, peer.method.samples_aside, peer.method.weight_aside) == (24, 0, 0.0)
    peer.train()
    peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (32, 32.0)
    assert set(peer.contribution()) == {4.0}


def test_samples_are_held_until_the_round_that_they_went_into_is_over():
    peer = Peer(STREAMING)
    peer.train(num_batches=2)
    peer.train(samples=3)
    assert (peer.method.samples_held, peer.method.samples_aside) == (19, 0)
    peer.set_aside()
    assert (peer.method.samples_held, peer.method.samples_aside) == (19, 16), "three have made no step yet"
    peer.train(samples=5)
    peer.train()
    assert (peer.method.samples_held, peer.method.samples_aside) == (32, 16)
    peer.end_with(1.0)
    assert (peer.method.samples_held, peer.method.samples_aside) == (16, 0)
    peer.set_aside()
    assert (peer.method.samples_held, peer.method.samples_aside) == (16, 16)


def test_who_made_no_step_brings_nothing_that_counts():
    peer = Peer(DILOCO)
    peer.train(samples=4)
    assert peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (0, 0.0)
    assert peer.contribution() == [0.0, 0.0]
    peer.end_with(2.0)
    assert peer.values == [-2.0, -2.0] and peer.method.samples_held == 4
    peer.train(samples=4)
    assert peer.values == [-3.0, -3.0], "its gradients are kept"


def test_a_weight_without_dimensions_is_exchanged_too():
    peer = Peer(STREAMING, shape=())
    peer.train()
    peer.set_aside()
    peer.train()
    assert peer.contribution() == [1.0]
    peer.end_with(0.5)
    assert peer.values == [-1.5, -2.0]


def test_other_weights_end_what_was_worked_for():
    peer = Peer(STREAMING)
    peer.train(num_batches=2)
    peer.train(samples=4)
    peer.method.reset()
    assert (peer.method.samples_held, peer.method.samples_aside) == (0, 0)
    before = peer.values
    peer.train(samples=4)
    assert peer.values == before, "the gradients before were for other weights"
    peer.train(samples=4)
    peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (8, 8.0)


# -- local steps: fragments and the end -----------------------------------------------------------


def test_fragments_are_exchanged_in_turn():
    peer, exchanged = Peer(STREAMING), []
    for count in range(5):
        peer.method.begin(2 * count, 1)
        exchanged.append(peer.method.places)
        peer.train()
        peer.set_aside()
        peer.end_with(1.0)
    first, second = range(1), range(1, 2)
    assert exchanged == [first, second, first, second, first]
    assert peer.anchors == [-3.0, -2.0] and peer.method.outer.rounds == 5


def test_a_newcomer_exchanges_the_fragment_whose_turn_it_is():
    peer = Peer(STREAMING)
    peer.method.outer.rounds = 3
    peer.method.begin(6, 1)
    assert peer.method.places == range(1, 2)


def test_a_fragment_counts_by_what_was_trained_since_it_was_exchanged():
    peer, counted = Peer(STREAMING), []
    for count, num_batches in enumerate([1, 2, 4, 8, 16]):
        peer.method.begin(2 * count, 1)
        peer.train(num_batches=num_batches)
        peer.set_aside()
        counted.append((peer.method.samples_aside, peer.method.weight_aside))
        peer.end_with(1.0)
    assert counted == [(8, 8), (16, 8 + 16), (32, 16 + 32), (64, 32 + 64), (128, 64 + 128)]


def test_what_was_trained_during_a_round_counts_in_the_next_of_each_fragment():
    peer, counted = Peer(STREAMING), []
    for count in range(4):
        peer.method.begin(2 * count, 1)
        peer.train()
        peer.set_aside()
        counted.append(peer.method.weight_aside)
        peer.train()
        peer.end_with(1.0)
    assert counted == [8, 24, 32, 32]


def test_a_failed_round_of_a_fragment_counts_nothing_twice():
    peer = Peer(STREAMING)
    peer.train()
    for _ in range(3):
        peer.set_aside()
        assert (peer.method.samples_aside, peer.method.weight_aside) == (8, 8.0)
        peer.method.take_back()


def test_what_a_round_is_compared_by_is_what_it_exchanges():
    peer = Peer(STREAMING)
    peer.train()
    peer.set_aside()
    peer.end_with(1.0)
    peer.method.begin(2, 1)
    anchor, momentum = peer.method.held_in_common()
    assert anchor is peer.method.outer.anchor[1] and momentum is peer.method.outer.momentum[1]


@pytest.mark.parametrize(
    ("pace", "max_steps", "rounds"),
    [
        (DILOCO, 8, [4, 4]),
        (DILOCO, 10, [4, 4, 2]),
        (DILOCO, 3, [3]),
        (STREAMING, 8, [2, 2, 2, 2]),
        (STREAMING, 7, [2, 2, 2, 1]),
        (STREAMING, 1, [1]),
    ],
)
def test_the_last_round_commits_the_steps_that_are_left_and_exchanges_all(pace, max_steps, rounds):
    peer, step, committed = Peer(pace, max_steps=max_steps), 0, []
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
    assert committed == rounds and step == max_steps
    assert peer.values == peer.anchors, "what was trained during the last round is nobody's any more"
    assert len(peer.method._copies) == 1, "no fragment has memory beside that for all"


# -- gradients that are shared --------------------------------------------------------------------


@pytest.mark.parametrize("mode", SHARED)
def test_what_comes_during_a_round_goes_into_the_next(mode):
    peer = Peer(SHARED[mode])
    peer.train(gradient=1.0)
    assert peer.set_aside()
    peer.train(gradient=16.0, samples=4)
    assert (peer.method.samples_held, peer.method.samples_aside, peer.method.weight_aside) == (12, 8, 8.0)
    assert peer.contribution() == [1.0, 1.0]
    peer.end_with(0.5)
    assert peer.values == [-0.5, -0.5]
    assert (peer.method.samples_held, peer.method.samples_aside) == (4, 0)
    peer.set_aside()
    # Batches count by their samples: this one's mean gradient is what it was.
    assert peer.contribution() == [16.0, 16.0]
    assert (peer.method.samples_aside, peer.method.weight_aside) == (4, 4.0)


@pytest.mark.parametrize("mode", SHARED)
def test_gradients_of_a_failed_round_go_into_the_next_with_those_that_came_meanwhile(mode):
    peer = Peer(SHARED[mode])
    peer.train(gradient=1.0)
    peer.set_aside()
    peer.train(gradient=3.0)
    peer.method.take_back()
    assert (peer.method.samples_held, peer.method.samples_aside) == (16, 0)
    assert peer.values == [0.0, 0.0]
    peer.train(gradient=8.0)
    peer.set_aside()
    assert (peer.method.samples_aside, peer.method.weight_aside) == (24, 24.0)
    assert peer.contribution() == [4.0, 4.0]


@pytest.mark.parametrize("mode", SHARED)
def test_failed_rounds_without_a_batch_meanwhile_keep_their_gradients(mode):
    peer = Peer(SHARED[mode])
    peer.train(gradient=2.0)
    for _ in range(3):
        peer.set_aside()
        peer.method.take_back()
    peer.set_aside()
    assert peer.contribution() == [2.0, 2.0] and peer.method.samples_aside == 8


@pytest.mark.parametrize("mode", SHARED)
def test_lent_gradients_do_not_touch_those_that_were_set_aside(mode):
    peer = Peer(SHARED[mode])
    for _ in range(4):  # memory changes hands with each round
        for gradient, previous in ((1.0, 3.0), (3.0, 1.0)):
            peer.gradients.expect_batch(8, 8, lend=True)
            sum(gradient * weight.sum() for weight in peer.weights).backward()
            peer.method.account(8)
            if peer.method.samples_aside:
                assert peer.contribution() == [previous, previous]
                peer.end_with(0.0)
            peer.set_aside()
            assert (peer.method.samples_held, peer.contribution()) == (8, [gradient, gradient])


@pytest.mark.parametrize("mode", SHARED)
def test_gradients_that_are_not_finite_never_go_into_a_round(mode):
    peer = Peer(SHARED[mode])
    peer.train(gradient=math.nan)
    assert not peer.set_aside()
    assert (peer.method.dropped_samples, peer.method.samples_held) == (8, 0)
    assert peer.values == [0.0, 0.0]
    peer.train(gradient=2.0)
    assert peer.set_aside() and peer.contribution() == [2.0, 2.0]


def test_other_weights_end_gradients_that_were_accumulated():
    peer = Peer(SYNC)
    peer.train(gradient=5.0)
    peer.method.reset()
    assert peer.method.samples_held == 0
    peer.train(gradient=2.0)
    peer.set_aside()
    assert peer.contribution() == [2.0, 2.0]


# -- the norm of an average -----------------------------------------------------------------------


@pytest.fixture
def averages():
    torch.manual_seed(0)
    return [torch.randn(shape) * 10.0**power for power, shape in enumerate([(300, 301), (), (7,), (0,)])]


@pytest.fixture
def num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_norm_is_that_of_all_values_together(averages):
    values = [value for average in averages for value in average.flatten().tolist()]
    assert len(values) > 5 * NORM_VALUES
    assert norm_of(averages) == pytest.approx(math.hypot(*values), rel=1e-14)
    assert norm_of([]) == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_the_norm_of_values_that_are_not_finite_is_not_finite(averages, poison):
    averages[0][17, 3] = poison
    assert not math.isfinite(norm_of(averages))


@pytest.mark.parametrize("norm", [0.5, 100.0, 0.0])
def test_an_average_is_clipped_as_torch_does_it(norm):
    torch.manual_seed(0)
    average, peer = torch.randn(1000), Peer(SYNC, norm=norm, shape=(1000,))
    peer.train()
    peer.set_aside()
    peer.end_with(average)
    theirs = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    for weight in theirs:
        weight.grad = average.clone()
    torch.nn.utils.clip_grad_norm_(theirs, norm or math.inf)
    for mine, weight in zip(peer.weights, theirs, strict=True):
        torch.testing.assert_close(-mine.detach(), weight.grad, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", SHARED)
def test_a_clipped_average_follows_from_ieee_754_alone(mode, threads, num_threads):
    """So it has the same bits whatever adds, multiplies and divides: any device, any number of threads."""
    torch.manual_seed(0)
    num_threads(threads)
    average, peer = torch.randn(2**16), Peer(SHARED[mode], norm=0.5, shape=(2**16,))
    peer.train()
    peer.set_aside()
    peer.end_with(average)
    norm = np.float32(math.sqrt(2 * math.fsum(value * value for value in average.tolist())))
    scale = np.float32(1.0) / (norm + np.float32(1e-6)) * np.float32(0.5)
    assert peer.method.last_grad_norm == norm
    assert all(np.array_equal(-weight.detach().numpy(), average.numpy() * scale) for weight in peer.weights)


# -- rounds that others had -----------------------------------------------------------------------


def follow(peer, average):
    """Have a peer go through a round that ended with this average."""
    for place in peer.method.places:
        peer.gradients._averaged_tensors[place].fill_(average)
    peer.method.follow()


@pytest.mark.parametrize("pace", [SYNC, OVERLAP])
def test_a_peer_that_follows_takes_the_step_that_members_took(pace):
    def adam(weights):
        optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1)
        initialize_state(optimizer)
        return optimizer

    member, follower = (Peer(pace, norm=0.5, make=adam) for _ in range(2))
    for average in (0.7, 0.1, -3.0):
        member.train()
        member.set_aside()
        member.end_with(average)
        follower.train(gradient=100.0)
        follow(follower, average)
        assert follower.method.samples_held == 0, "that was of older weights"
        assert follower.values == member.values
        assert follower.method.last_grad_norm == member.method.last_grad_norm


@pytest.mark.parametrize("pace", [DILOCO, STREAMING])
def test_a_peer_that_follows_keeps_its_own_steps_for_the_next_round(pace):
    member, follower = Peer(pace), Peer(pace)
    member.train()
    member.set_aside()
    follower.train(gradient=2.0)
    for peer, goes_on in ((member, Peer.end_with), (follower, follow)):
        goes_on(peer, 0.25)
    assert follower.anchors == member.anchors and follower.anchors[0] == -0.25
    moved = [-2.0 + anchor for anchor in follower.anchors]
    assert follower.values == moved and follower.method.samples_held == 8
    follower.method.begin(2, 1)
    assert follower.set_aside() and follower.contribution() == [2.0] * len(follower.method.places)


def test_at_the_end_of_a_run_a_follower_holds_what_is_agreed_on():
    follower = Peer(STREAMING, max_steps=1)
    follower.train(gradient=2.0)
    follow(follower, 0.25)
    assert follower.values == follower.anchors == [-0.25, -0.25]


# -- the guess ------------------------------------------------------------------------------------


def test_weights_wait_for_a_round_or_are_where_their_own_gradient_leads():
    peer, ahead = Peer(SYNC), Peer(OVERLAP)
    for each in (peer, ahead):
        each.train(gradient=4.0)
        each.set_aside()
    assert (peer.values, ahead.values) == ([0.0, 0.0], [-4.0, -4.0])
    assert all(not weight.any() for weight in ahead.method.held_in_common())
    for each in (peer, ahead):
        each.end_with(0.5)
    assert peer.values == ahead.values == [-0.5, -0.5]


def test_a_guess_is_clipped_as_the_step_is():
    peer = Peer(OVERLAP, norm=1.0)
    peer.train(gradient=10.0)
    peer.set_aside()
    guess = peer.values
    peer.end_with(10.0)
    assert guess == peer.values == pytest.approx([-0.5, -0.5], rel=1e-5)


ADAPTIVE = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1),
}


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_guess_leaves_no_trace(name, lend, num_batches, monkeypatch):
    """Whoever trained on during its rounds holds what one that waited holds, bit for bit."""
    monkeypatch.setattr(methods, "GUESS_BYTES", 2**20 // num_batches)
    waited, ahead = (Peer(pace, make=ADAPTIVE[name], shape=(2**16, 2)) for pace in (SYNC, OVERLAP))
    for peer in (waited, ahead):
        torch.manual_seed(0)
        initialize_state(peer.state.optimizer)
        for _ in range(4):
            peer.gradients.expect_batch(8, 8, lend=lend)
            sum((weight * torch.randn(weight.shape)).sum() for weight in peer.weights).backward()
            peer.method.account(8)
            peer.set_aside()  # without lending, the gradients of the batch are still there
            peer.method.load()
            for average in peer.gradients._averaged_tensors:
                average.add_(torch.randn(average.shape))
            peer.method.apply()
            for weight in peer.weights:
                weight.grad = None
    assert all(map(torch.equal, waited.weights, ahead.weights))
    for mine, theirs in zip(waited.weights, ahead.weights, strict=True):
        ours, others = waited.state.optimizer.state[mine], ahead.state.optimizer.state[theirs]
        assert ours.keys() == others.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(others[key])) for key in ours)


def test_own_weights_that_are_not_finite_do_not_stay():
    peer = Peer(STREAMING)
    with torch.no_grad():
        peer.weights[0][0] = torch.inf
    for count in range(4):
        peer.method.begin(2 * count, 1)
        peer.train()
        if peer.set_aside():
            peer.end_with(0.5)
    assert all(bool(weight.isfinite().all()) for weight in peer.weights)
    assert peer.method.dropped_samples > 0
