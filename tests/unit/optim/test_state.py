"""What is given to joiners, and what they adopt of it: all, or nothing."""

import threading

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo
from hivemind.utils import MSGPackSerializer

from tests.kit.averagers import giving_averager, state_averager, state_of
from trahiv_cli.errors import RoundFailed
from trahiv_cli.optim import state as states
from trahiv_cli.optim.codecs import CODECS, EightBitStatistics
from trahiv_cli.optim.history import History
from trahiv_cli.optim.ledger import Ledger, Spans
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.swarm.snapshot import JoinerActivity, Manifest, build_snapshot, read_state, views_of
from trahiv_cli.swarm.state_averager import adopt_optimizer_state

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("our_codecs")

AHEAD, LONGER = History(3, 30, b"b" * 16), History(4, 40, b"a" * 16)
OTHER = History(5, 25, b"c" * 16)
"""Of the other half of a swarm that was cut in two: more steps, fewer samples."""


def averager_of(history, *, fill=1.0, has_local_steps=False):
    parameter = torch.nn.Parameter(torch.full((3,), fill))
    averager = giving_averager(torch.optim.SGD([parameter], lr=0.1), history, "QmA")
    averager.move_schedule(history.step)
    if has_local_steps:
        averager.outer = OuterState(averager.main_parameters, learning_rate=0.7, momentum=0.9)
        averager.agreed = averager.outer.anchor
    return averager


def everything(averager):
    [parameter] = averager.main_parameters
    rates = [group["lr"] for group in averager.optimizer.param_groups]
    assert averager.ledger == Ledger(Spans.of([(0, averager.history.samples)])), "the history's own"
    return averager.history, averager.local_epoch, parameter.tolist(), rates, averager.donor


def test_a_state_is_adopted_with_its_history_whole_or_not_at_all(download):
    metadata, tensors = state_of(averager_of(AHEAD, fill=2.0))
    joiner = averager_of(History())
    before = everything(joiner)
    assert download(joiner, (metadata | {"epoch": 4}, tensors)) is False, "not its history's"
    for poison in (float("nan"), -float("inf")):
        with pytest.raises(RoundFailed, match="not finite"):
            download(joiner, (metadata, [torch.tensor([2.0, poison, 2.0]), *tensors[1:]]))
    assert everything(joiner) == before
    assert "donor" not in metadata, "equal states are given in the same bytes"
    assert download(joiner, (metadata | {"donor": "QmB"}, tensors)) is True
    assert everything(joiner) == (AHEAD, 3, [2.0] * 3, [0.025], "QmB")


@pytest.mark.parametrize(
    ("given", "own", "is_welcome"),
    [(AHEAD, AHEAD, True), (LONGER, AHEAD, True), (AHEAD, OTHER, True), (OTHER, AHEAD, False)],
    ids=["equal", "longer", "more samples in fewer steps", "fewer samples in more steps"],
)
def test_a_state_of_a_history_as_good_or_better_is_welcome(download, given, own, is_welcome):
    donor, joiner = averager_of(given, fill=2.0), averager_of(own)
    before = everything(joiner)
    assert download(joiner, state_of(donor)) is is_welcome
    assert everything(joiner)[:4] == (everything(donor) if is_welcome else before)[:4]
    for averager in (donor, joiner):  # it goes on with the learning rates of what it holds
        averager.local_epoch += 1
        averager.move_schedule(averager.local_epoch)
    assert not is_welcome or everything(joiner)[3] == everything(donor)[3]


def test_a_joiner_in_a_mode_with_local_steps_begins_with_the_agreed_weights(download):
    donor = averager_of(AHEAD, fill=2.0, has_local_steps=True)
    joiner = averager_of(History(), has_local_steps=True)
    donor.outer.step(range(1), [torch.ones(3)])
    agreed, momentum = donor.outer.anchor[0].clone(), donor.outer.momentum[0].clone()
    metadata, tensors = state_of(donor)
    donor.outer.step(range(1), [torch.ones(3)])  # what was given does not change any more
    with pytest.raises(RoundFailed, match="which fragment"):
        download(joiner, (metadata | {"outer_rounds": -1}, tensors))
    assert download(joiner, (metadata, tensors)) is True
    [weight], outer = joiner.main_parameters, joiner.outer
    assert torch.equal(weight, agreed) and torch.equal(outer.anchor[0], agreed)
    assert torch.equal(outer.momentum[0], momentum) and outer.rounds == 1
    assert weight is not outer.anchor[0] and donor.main_parameters[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("has_local_steps", [False, True], ids=["shared gradients", "local steps"])
def test_a_joiner_asks_others_for_what_they_say_of_the_state_that_they_give(download, has_local_steps):
    donor = averager_of(AHEAD, fill=2.0, has_local_steps=has_local_steps)
    joiner = averager_of(History(), has_local_steps=has_local_steps)
    said, asked = [], []
    donor.note_given = lambda history, common: said.append((history, common))
    joiner.is_believed = lambda *what: asked.append(what) or False
    metadata, tensors = state_of(donor)
    before = everything(joiner)
    assert download(joiner, (metadata | {"donor": "QmB"}, tensors)) is False
    assert everything(joiner) == before, "it was not believed"
    [(history, common, who)] = asked
    assert said == [(history, common)] == [(AHEAD, common)] and len(common) == 32 and who == "QmB"
    tensors[0][1] += 1.0
    download(joiner, (metadata, tensors))
    assert asked[1][1] != common
    joiner.state_compression = compression.Float16Compression()  # of rounded weights nobody can say
    download(joiner, (metadata, tensors))
    assert asked[2] == (AHEAD, b"", "")


# -- statistics in 8 bits -------------------------------------------------------------------------


def through(tensor, codec=None):
    message = (codec or EightBitStatistics()).compress(tensor, CompressionInfo.from_tensor(tensor))
    return EightBitStatistics().extract(message), len(message.buffer)


@pytest.mark.parametrize("decades", [0, 2, 4, 6])
def test_a_step_with_statistics_in_8_bits_stays_about_the_same_whatever_their_scales(decades):
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-decades * torch.rand(2**15, generator=generator))
    second = scale**2 * (0.5 + torch.rand(scale.shape, generator=generator))
    first = scale * torch.randn(scale.shape, generator=generator)
    (first_again, num_bytes), (second_again, _) = through(first), through(second)
    assert num_bytes < 0.27 * first.nbytes and bool((second_again > 0).all())
    assert (second / second_again).sqrt().max() < 4, "of the step that is divided by it"
    if decades == 0:
        before, after = first / (second.sqrt() + 1e-12), first_again / (second_again.sqrt() + 1e-12)
        assert (after - before).norm() < 0.02 * before.norm()
    if decades >= 4:
        assert bool((through(second, CODECS["blockwise8"]())[0] == 0).any()), "it would divide by 0"


def test_all_else_stays_as_it_is():
    large = torch.arange(5000.0)
    for tensor in (large[:4000], large.double(), large.to(torch.uint8), torch.tensor(7), large / 0):
        again, _ = through(tensor)
        assert again.dtype == tensor.dtype and torch.equal(again.nan_to_num(), tensor.nan_to_num())


# -- who may round its own ------------------------------------------------------------------------


def adam_averager(seed, interest=None):
    torch.manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(128, 64)), torch.nn.Parameter(torch.randn(7))]
    inner = torch.optim.Adam(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    inner.step()
    return state_averager(inner, weights, parameter_names=("a", "b"), interest=interest)


@pytest.fixture
def donor():
    """A peer that holds its state alone, after a step of Adam; one that has none asked for it."""
    interest = JoinerActivity()
    interest.note_asker(0)
    averager = adam_averager(0, interest)
    averager.history, averager.local_epoch = History(1, 10, bytes(16)), 1
    averager.holds_alone = lambda: True
    return averager


def statistics_of(averager):
    """Copies of what the inner optimizer holds."""
    held = averager.optimizer.state
    return [held[weight][name].clone() for weight in averager.weights for name in ("exp_avg", "exp_avg_sq")]


def test_who_holds_its_state_alone_gives_statistics_in_8_bits_and_keeps_the_same(donor, monkeypatch):
    exact, joiner = statistics_of(donor), adam_averager(1)
    described, [flat], infos = donor.get_current_state()
    encoded = {index: tuple(rest) for index, *rest in described.pop("encoded")}
    plain, views = compression.NoCompression(), views_of(flat, infos)
    taken = build_snapshot((1, b""), MSGPackSerializer.dumps(described), views, infos, plain, encoded)
    assert taken.manifest.num_bytes < 0.55 * 3 * 4 * 128 * 64
    content = torch.frombuffer(bytearray(b"".join(taken.content)), dtype=torch.uint8)
    metadata, tensors = read_state(Manifest.from_bytes(taken.described), content)
    adopt_optimizer_state(joiner.optimizer, metadata["optimizer_metadata"], tensors[len(donor.weights) :])
    rounded = statistics_of(donor)
    assert all(map(torch.equal, rounded, statistics_of(joiner)))
    assert all((one - other).norm() < 0.02 * other.norm() for one, other in zip(rounded, exact, strict=True))
    assert all(map(torch.equal, tensors, donor.weights)), "weights stay as they were"
    assert "encoded" not in donor.get_current_state()[0], "once in a time, however often it is asked"
    assert all(map(torch.equal, statistics_of(donor), rounded))
    monkeypatch.setattr(states, "ROUNDED_EVERY_S", 0.0)
    assert "encoded" in donor.get_current_state()[0]


def test_whether_it_holds_its_state_alone_is_asked_while_no_round_can_change_that(donor):
    has_entered = threading.Event()

    def commit():
        with donor.lock_state:
            has_entered.set()

    def ask():
        threading.Thread(target=commit, daemon=True).start()
        return not has_entered.wait(0.2)

    donor.holds_alone = ask
    assert "encoded" in donor.get_current_state()[0]
    assert has_entered.wait(5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("holds_alone", lambda: False),
        ("history", History(1, 0, bytes(16))),
        ("outer", OuterState([], 0.7, 0.5)),
    ],
    ids=["others hold it", "the joiner is as far", "local steps"],
)
def test_else_nobody_rounds_its_own(donor, name, value):
    setattr(donor, name, value)
    before = statistics_of(donor)
    assert "encoded" not in donor.get_current_state()[0]
    assert all(map(torch.equal, statistics_of(donor), before))
