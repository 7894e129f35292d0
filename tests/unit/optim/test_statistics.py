"""What 8 bits make of an optimizer's statistics: a step of the same size, and never a division by 0."""

import pytest
import torch
from hivemind import compression
from hivemind.compression import CompressionInfo
from hivemind.utils import MSGPackSerializer

from tests.kit.averagers import state_averager
from trahiv_cli.optim import state as states
from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.history import History
from trahiv_cli.optim.outer import OuterState
from trahiv_cli.optim.statistics import SMALLEST, EightBitStatistics
from trahiv_cli.swarm.snapshot import Manifest, build_snapshot, read_state, views_of
from trahiv_cli.swarm.state_averager import adopt_optimizer_state

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("our_codecs")


def through(tensor, codec=None):
    codec = codec or EightBitStatistics()
    message = codec.compress(tensor, CompressionInfo.from_tensor(tensor))
    return EightBitStatistics().extract(message), len(message.buffer)


def moments(decades):
    """First and second moments of values whose scale varies over so many decades."""
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-decades * torch.rand(8 * SMALLEST, generator=generator))
    second = scale**2 * (0.5 + torch.rand(scale.shape, generator=generator))
    return scale * torch.randn(scale.shape, generator=generator), second


def steps(first, second):
    return first / (second.sqrt() + 1e-12)


def test_a_step_with_statistics_of_one_scale_stays_the_same():
    first, second = moments(decades=0)
    (first_again, size), (second_again, _) = through(first), through(second)
    lost = steps(first_again, second_again) - steps(first, second)
    assert lost.norm() < 0.02 * steps(first, second).norm()
    assert size < 0.27 * first.nbytes


@pytest.mark.parametrize("decades", [2, 4, 6])
def test_no_step_explodes_whatever_the_scales(decades):
    first, second = moments(decades)
    again, _ = through(second)
    assert bool((again > 0).all())
    growth = (second / again).sqrt().max()
    assert growth < 4, "of the step that is divided by it"


def test_a_codec_in_blocks_would_divide_by_0():
    _, second = moments(decades=4)
    assert bool((through(second, CODECS["blockwise8"]())[0] == 0).any())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(SMALLEST - 1.0),
        torch.arange(SMALLEST, dtype=torch.float64),
        torch.arange(SMALLEST).to(torch.uint8),
        torch.tensor(7),
        torch.full((SMALLEST,), torch.inf),
    ],
    ids=["small", "float64", "bytes", "step count", "not finite"],
)
def test_all_else_stays_as_it_is(tensor):
    again, _ = through(tensor)
    assert again.dtype == tensor.dtype and torch.equal(again, tensor)


# -- who may round its own ------------------------------------------------------------------------


def donor():
    """A peer's state after one step of Adam, and the joiner's before."""
    averagers = []
    for seed in range(2):
        torch.manual_seed(seed)
        weights = [torch.nn.Parameter(torch.randn(128, 64)), torch.nn.Parameter(torch.randn(7))]
        inner = torch.optim.Adam(weights, lr=0.1)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        inner.step()
        averagers.append(state_averager(inner, weights, parameter_names=("a", "b")))
    own, joiner = averagers
    own.history, own.local_epoch = History(1, 10, bytes(16)), 1
    own._interest.note_asker(0)
    own.holds_alone = lambda: True
    return own, joiner


def statistics_of(averager):
    states = averager.optimizer.state
    return [states[weight][name] for weight in averager.weights for name in ("exp_avg", "exp_avg_sq")]


def given(averager):
    """What a joiner gets of a state, through a snapshot, and how many bytes that is."""
    described, [flat], infos = averager.get_current_state()
    encoded = {index: tuple(rest) for index, *rest in described.pop("encoded", ())}
    metadata = MSGPackSerializer.dumps(described)
    views = views_of(flat, infos)
    taken = build_snapshot((1, b""), metadata, views, infos, compression.NoCompression(), encoded)
    content = torch.frombuffer(bytearray(b"".join(taken.content)), dtype=torch.uint8)
    return read_state(Manifest.from_bytes(taken.described), content), taken.manifest.num_bytes


def test_who_holds_its_state_alone_gives_statistics_in_8_bits_and_keeps_the_same():
    own, joiner = donor()
    before = [tensor.clone() for tensor in statistics_of(own)]
    (metadata, tensors), size = given(own)
    assert size < 0.55 * 3 * 4 * 128 * 64
    weights = [weight.detach().clone() for weight in own.weights]
    adopt_optimizer_state(joiner.optimizer, metadata["optimizer_metadata"], tensors[len(weights) :])
    for held, adopted, exact in zip(statistics_of(own), statistics_of(joiner), before, strict=True):
        assert torch.equal(held, adopted)
        assert (held - exact).norm() < 0.02 * exact.norm()
    assert all(map(torch.equal, tensors, weights)), "weights stay as they were"


def test_however_often_it_is_asked_it_rounds_its_own_once_in_a_time(monkeypatch):
    own, _ = donor()
    assert "encoded" in own.get_current_state()[0]
    before = [tensor.clone() for tensor in statistics_of(own)]
    assert "encoded" not in own.get_current_state()[0]
    assert all(map(torch.equal, statistics_of(own), before)), "given as they are"
    monkeypatch.setattr(states, "ROUNDED_EVERY_S", 0.0)
    assert "encoded" in own.get_current_state()[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"holds_alone": lambda: False},
        {"history": History(1, 0, bytes(16))},
        {"outer": OuterState([], 0.7, 0.5)},
    ],
    ids=["others hold it", "the joiner is as far", "local steps"],
)
def test_else_nobody_rounds_its_own(changes):
    own, _ = donor()
    own.__dict__.update(changes)
    before = [tensor.clone() for tensor in statistics_of(own)]
    metadata, _, _ = own.get_current_state()
    assert "encoded" not in metadata
    assert all(map(torch.equal, statistics_of(own), before))
