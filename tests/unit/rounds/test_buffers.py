"""Buffers that training changes: which ones count as moving, and what a round does to them.

Numbers are powers of two or sums of them, so expected values are exact.
"""

import math
from concurrent.futures import wait
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.kit.states import giving_state, state_of
from tests.kit.stepping import Peer, commits, fails, sgd, with_b
from trahiv_cli.progress.history import History
from trahiv_cli.progress.pace import Pace
from trahiv_cli.rounds.buffers import Buffers, moving_buffers, persistent_buffers
from trahiv_cli.rounds.claims import Claim

torch.set_num_threads(1)

LIMIT_S = 10.0
DILOCO = Pace("diloco", local_steps=1, outer_learning_rate=1.0, outer_momentum=0.0)
STREAMING = Pace("streaming", local_steps=1, fragments=1, outer_learning_rate=1.0, outer_momentum=0.0)
PACES = (Pace("sync"), Pace("overlap"), DILOCO, STREAMING)
each_pace = pytest.mark.parametrize("pace", PACES, ids=lambda pace: pace.mode)


class Holding(nn.Module):
    """A module with the given buffers; names that begin with `temporary` are not saved."""

    def __init__(self, **buffers):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value), persistent=not name.startswith("temporary"))


LOWEST = torch.finfo(torch.float32).min
NORMS = {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    ("layer", "moving"),
    [
        (nn.BatchNorm1d(2), NORMS),
        (nn.InstanceNorm1d(2, track_running_stats=True), NORMS),
        (nn.BatchNorm1d(2, track_running_stats=False), ()),
        (nn.LayerNorm(2), ()),
        (spectral_norm(nn.Linear(3, 2)), {"parametrizations.weight.0._u", "parametrizations.weight.0._v"}),
        (Holding(teacher=torch.ones(2).bfloat16(), codebook=torch.zeros(3, 2)), {"teacher", "codebook"}),
        (Holding(temporary=1.0, table=[1, 2], flag=True, wave=1j), ()),
        (Holding(mask=[0.0, -math.inf], other=[0.0, LOWEST], nothing=math.nan), ()),
        (Holding(qweight=torch.ones(2, 2).int(), scales=torch.ones(2)), ()),
        (Holding(weight=torch.ones(2, 2).to(torch.float8_e4m3fn), scale=1.0), ()),
    ],
)
def test_moving_buffers_exclude_constants(layer, moving):
    found = moving_buffers(nn.ModuleDict({"layer": layer}))
    assert found.keys() == {f"layer.{name}" for name in moving}


def test_persistent_buffers_exclude_quantization_scales():
    layer = Holding(qweight=torch.ones(2, 2, dtype=torch.uint8), scales=torch.ones(2))
    found = persistent_buffers(nn.Sequential(layer, nn.BatchNorm1d(1)))
    assert found.keys() == {f"1.{name}" for name in NORMS}


def test_replaced_buffer_is_found_again():
    model = Holding(average=[1.0])
    buffers = Buffers(model)
    model.average = model.average * 3
    buffers.set_aside()
    buffers.apply(keeps_own=False)
    assert [one.tolist() for one in buffers.common] == [[3.0]]
    assert model.average is buffers.live["average"]


class Statistics(Holding):
    """The model that a peer trains here: a mean, a variance and a count."""

    def __init__(self):
        super().__init__(mean=torch.zeros(2), variance=torch.ones(2), count=0)

    def move(self, mean, variance, count):
        self.mean.fill_(mean)
        self.variance.fill_(variance)
        self.count.fill_(count)

    @property
    def values(self):
        return [*self.mean.tolist(), *self.variance.tolist(), self.count.item()]


def peer_of(model, pace, end=None, **settings):
    weight = nn.Parameter(torch.zeros(2))
    return Peer([weight], sgd, with_b() if end else None, end, pace, model=model, **settings)


AVERAGE = [2.0, 2.0, 8.0, 8.0, 5.0]


@each_pace
def test_failed_round_keeps_buffers(pace, model):
    peer = peer_of(model, pace, fails, averaging_s=0.0)
    model.move(1.0, 4.0, 3)
    peer.leaves_after = 1
    peer.train()
    wait([peer.stepper._running] if peer.stepper._running else [], LIMIT_S)
    peer.stepper.stop()
    assert peer.history.step == 0
    assert model.values == [1.0, 1.0, 4.0, 4.0, 3]
    assert peer.state.common_tensors()[1].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0]


@each_pace
def test_lone_peer_agrees_on_own_buffers(pace, model):
    peer = peer_of(model, pace)
    model.move(0.5, 0.1, 7)
    before = model.values
    peer.train()
    assert peer.history.step == 1
    assert peer.state.common_tensors()[1].tolist() == model.values == before


@pytest.fixture
def model():
    return Statistics()


@pytest.fixture
def buffers(model):
    return Buffers(model)


def test_buffers_are_snapshotted_at_round_start(model, buffers):
    model.move(1.0, 4.0, 3)
    assert not buffers.have_moved
    buffers.set_aside()
    assert buffers.have_moved
    model.move(9.0, 9.0, 9)
    assert buffers.exchanged[0].tolist() == [1.0, 1.0, 4.0, 4.0, 3.0]


@pytest.mark.parametrize(
    ("keeps_own", "aside", "now", "average", "values"),
    [
        (True, (1.0, 4.0, 3), (1.5, 3.0, 5), AVERAGE, [2.5, 2.5, 7.0, 7.0, 7]),
        (False, (1.0, 4.0, 3), (1.5, 3.0, 5), AVERAGE, AVERAGE),
        # A variance stays positive:
        (True, (1.0, 8.0, 1), (1.0, 1.0, 1), [0.0, 0.0, 2.0, 0.5, 1.0], [0.0, 0.0, 1.0, 0.5, 1]),
    ],
)
def test_movement_during_round_carries_over(model, buffers, keeps_own, aside, now, average, values):
    model.move(*aside)
    buffers.set_aside()
    model.move(*now)
    buffers.exchanged[0].copy_(torch.tensor(average))
    buffers.apply(keeps_own=keeps_own)
    assert model.values == values
    assert [one.tolist() for one in buffers.common] == [average]
    buffers.set_aside()
    assert buffers.exchanged[0].tolist() == values


def test_last_round_leaves_agreed_buffers(model):
    peer = peer_of(model, Pace("overlap"), commits(), max_steps=1)
    model.move(1.0, 4.0, 3)
    peer.state.buffers.set_aside()
    model.move(1.5, 4.5, 4)
    outcome = commits(moves_buffers=True)(peer.rounds)
    peer.state.buffers.exchanged[0].copy_(torch.tensor(AVERAGE))
    peer.position.method.set_aside(goes_on=True)
    peer.position.commit(peer.position.after(13, b"proof"), outcome)
    assert model.values == AVERAGE


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_agreed_value_replaces_unusable_one(model, buffers, poison):
    model.move(2.0, 4.0, 1)
    model.variance[0] = poison
    buffers.set_aside()
    assert buffers.exchanged[0].tolist() == [2.0, 2.0, 1.0, 4.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_agreed_values_are_rounded_to_dtype(dtype):
    model = Holding(value=torch.zeros((), dtype=dtype))
    buffers = Buffers(model)
    buffers.exchanged[0].fill_(2.30078125001)
    buffers.apply(keeps_own=False)
    assert buffers.common[0].item() == model.value.item() == Buffers(model).common[0].item()
    assert abs(model.value.item() - 2.3) < (0.5 if dtype == torch.int64 else 0.01)


@pytest.mark.parametrize(("model", "num_buffers"), [(nn.LayerNorm(2), 0), (Holding(scale=3.0), 1)])
def test_claim_omits_flag_of_unmoved_buffers(model, num_buffers):
    peer = peer_of(model, Pace(), commits())
    peer.train()
    [claim] = peer.rounds.claims
    moved = replace(claim, moves_buffers=True)
    assert not claim.moves_buffers
    assert len(claim.to_bytes()) + 1 == len(moved.to_bytes())
    assert Claim.parse(moved.to_bytes()) == moved
    assert len(peer.state.buffers.common) == len(peer.state.buffers.exchanged) == num_buffers
    assert len(peer.state.common_tensors()) == 1 + num_buffers


@pytest.mark.parametrize("has_local_steps", [False, True], ids=["shared gradients", "local steps"])
def test_joiner_adopts_donors_agreed_buffers(download, has_local_steps):
    ahead = History(3, 30, b"b" * 16)
    donor = giving_state(ahead, fill=2.0, has_local_steps=has_local_steps)
    joiner = giving_state(History(), has_local_steps=has_local_steps)
    donor.buffers.live["statistic"].fill_(9.0)  # a batch since the last round
    assert joiner.buffers.live["statistic"].tolist() == [1.0] * 4
    assert download(joiner, state_of(donor)) is True
    assert joiner.buffers.live["statistic"].tolist() == [2.0] * 4
    assert not joiner.buffers.have_moved
