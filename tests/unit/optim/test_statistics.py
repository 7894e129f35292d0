"""What 8 bits make of an optimizer's statistics: a step of the same size, and never a division by 0."""

import pytest
import torch
from hivemind.compression import CompressionInfo

from trahiv_cli.optim.codecs import CODECS
from trahiv_cli.optim.statistics import SMALLEST, EightBitStatistics

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
