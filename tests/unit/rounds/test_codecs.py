"""The precision of each codec, the size of its messages, and the messages that it refuses."""

import math

import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2

from trahiv_cli.rounds.codecs import CODECS, LEVELS, read_tensor

pytestmark = pytest.mark.filterwarnings("error")  # torch warns about read-only memory

NUM_VALUES, SOME = 131072, 8192
LOSSY = [name for name in CODECS if name != "none"]
FLOAT32 = torch.finfo(torch.float32)
MOST = {"none": 0, "blockwise4": 0.15}  # the largest error over the largest magnitude; otherwise 1 / 100

each_codec = pytest.mark.parametrize("name", CODECS)


def drawn(seed, draw):
    return torch.from_numpy(draw(np.random.default_rng(seed))).float()


GAUSSIAN = drawn(0, lambda chance: chance.standard_normal(NUM_VALUES) * 1e-3)
HEAVY_TAILS = drawn(1, lambda chance: chance.standard_t(3, NUM_VALUES) * 1e-4)
SIX_DECADES = drawn(
    2, lambda chance: 10 ** chance.uniform(-8, -2, NUM_VALUES) * chance.choice([-1, 1], NUM_VALUES)
)
FAR_FROM_ZERO = drawn(3, lambda chance: 1 + 1e-3 * chance.standard_normal(NUM_VALUES))


def info_of(tensor):
    return CompressionInfo.from_tensor(tensor, key="layer.weight").get_part(3, None)


def encode(name, tensor):
    return CODECS[name]().compress(tensor, info_of(tensor))


def there_and_back(name, tensor):
    return CODECS[name]().extract(encode(name, tensor))


def lost(name, tensor):
    error = there_and_back(name, tensor).double() - tensor.double()
    return float(error.norm() / tensor.double().norm())


BANDS = {  # root mean square of the error over that of the values
    "none": [(0, 0)] * 4,
    "float16": [(1.9e-4, 2.3e-4), (1.9e-4, 2.3e-4), (1.9e-4, 2.3e-4), (1e-4, 3e-4)],
    "uniform8": [(7.5e-3, 8.3e-3), (2.0e-2, 3.6e-2), (8e-3, 9e-3), (2e-3, 4e-3)],
    "blockwise8": [(6.8e-3, 7.3e-3), (8.3e-3, 9.8e-3), (5.8e-3, 6.4e-3), (2e-3, 5e-3)],
    "blockwise4": [(8.4e-2, 8.8e-2), (0.12, 0.135), (8.2e-2, 8.7e-2), (1e-3, 1.3e-3)],
}


@each_codec
def test_codec_error_matches_table(name):
    drawn_values = GAUSSIAN, HEAVY_TAILS, SIX_DECADES, FAR_FROM_ZERO
    for values, (low, high) in zip(drawn_values, BANDS[name], strict=True):
        assert low <= lost(name, values) <= high


@each_codec
def test_bfloat16_loses_little(name):
    most = {"none": 0, "float16": 0, "blockwise4": 9e-2}.get(name, 9e-3)
    assert lost(name, GAUSSIAN[:SOME].bfloat16()) <= most


@each_codec
def test_zero_stays_zero(name):
    tensor = FAR_FROM_ZERO[:SOME].clone()
    tensor[::3] = 0
    assert not there_and_back(name, tensor)[::3].any()


@pytest.mark.parametrize("name, dtype", [(name, one) for name in CODECS for one in CODECS[name].dtypes])
def test_round_trip_keeps_shape_and_dtype(name, dtype):
    all_values = (HEAVY_TAILS[: SOME - 100] * 1e4).to(dtype).reshape(-1, 2, 2)
    views = all_values.transpose(0, 2), all_values[::2], all_values[:1].expand(9, 2, 2), all_values[0, 0, 0]
    for tensor in (all_values, *views):
        before = tensor.clone()
        decoded = there_and_back(name, tensor)
        assert torch.equal(tensor, before)
        assert encode(name, before) == encode(name, tensor)
        assert torch.equal(there_and_back(name, decoded), decoded)
        atol = float(tensor.double().abs().amax()) * MOST.get(name, 1 / 100)
        torch.testing.assert_close(decoded, tensor, rtol=0, atol=atol)
    is_float = dtype.is_floating_point
    assert encode(name, before.requires_grad_(is_float)).requires_grad is is_float


def test_verbatim_keeps_every_bit():
    odd = torch.tensor([float("nan"), float("inf"), -0.0])
    assert torch.equal(there_and_back("none", odd).view(torch.int32), odd.view(torch.int32))


@pytest.mark.parametrize("scale", [1e-38, 1e30])
def test_float16_scales_its_range(scale):
    tensor = GAUSSIAN[:SOME] * 1e3 * scale
    error = (there_and_back("float16", tensor) - tensor).abs()
    assert torch.all(error <= tensor.abs() * 2**-11 + FLOAT32.smallest_normal * 2**-11)


def test_float16_keeps_small_values_beside_large():
    tensor = torch.tensor([1.0, 1e-9, -3e-9, 4e-12])
    decoded = there_and_back("float16", tensor)
    assert torch.all((decoded - tensor).abs() <= 2**-39)
    assert torch.all(decoded != 0)


def test_only_blockwise8_keeps_small_values_beside_large():
    tensor = torch.tensor([1.0, 1e-4])
    assert there_and_back("blockwise8", tensor)[1] > 0 == there_and_back("uniform8", tensor)[1]


EXTREMES = [
    *([2.5], [-7e-4] * 5000, [0.0] * 300, [1e-45, -3e-45, 0.0, 1e-40], [1e38, -1e38, 5.0], [-0.0, 0.0]),
    *([FLOAT32.max, FLOAT32.min, FLOAT32.max], [FLOAT32.max, 1e38, 1.1e38]),
]
NARROW = torch.tensor([1.0, -57600 / 65504, -57600 / 65504, -60000 / 65504])


@each_codec
def test_extreme_values_stay_finite(name):
    for values in EXTREMES:
        tensor = torch.tensor(values)
        error = there_and_back(name, tensor).double() - tensor.double()
        # In bfloat16, steps of subnormal numbers are 2^-133 wide.
        least = 2**-133 if name == "blockwise4" else 0
        assert error.abs().amax() <= max(tensor.double().abs().amax() * MOST.get(name, 1 / 250), least)
        if len(set(values)) == 1 and name not in ("float16", "blockwise4"):
            assert not error.any()


@each_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_largest_values_are_not_rounded_to_infinity(name, dtype):
    limit = torch.finfo(dtype).max
    tensor = (limit * NARROW).to(dtype)
    most = MOST.get(name, 1 / 100) * limit
    torch.testing.assert_close(there_and_back(name, tensor), tensor, rtol=0, atol=most)


HEADERS = {"none": 0, "float16": 2, "uniform8": 4 * 3, "blockwise8": 4 * 9, "blockwise4": 2 * 33}


@each_codec
def test_message_size_matches_codec(name):
    codec, tensor = CODECS[name](), torch.ones(2 * 1024 + 1)
    codes = math.ceil(codec.estimate_compression_ratio(info_of(tensor)) * tensor.nbytes)
    expected = codec.encoded_bytes(tensor.numel(), tensor.dtype)
    assert len(encode(name, tensor).buffer) == codes + HEADERS[name] == expected


@each_codec
@pytest.mark.parametrize("shape", [(0,), (4, 0, 2)])
def test_empty_tensor_takes_no_bytes(name, shape):
    assert encode(name, torch.empty(shape)).buffer == b""
    assert there_and_back(name, torch.empty(shape)).shape == shape


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codec_refuses_unencodable_values(name):
    for poison in (float("nan"), float("inf"), -float("inf"), 1e300):
        tensor = torch.ones(2000, dtype=torch.float64)
        tensor[1234] = poison
        with pytest.raises(ValueError, match=r"Part 3 of tensor 'layer.weight' has values that are not fin"):
            encode(name, tensor)
    with pytest.raises(ValueError, match=r"is torch\.int64"):
        encode(name, torch.arange(5))


@pytest.mark.parametrize(
    "names, changes, words",
    [
        *((CODECS, {"dtype": dtype}, "is not taken") for dtype in ("(2000000,)f8", "", "Tensor")),
        *((CODECS, {"size": [length]}, "bytes where its shape takes") for length in (2**32 - 1, 5, 0)),
        (CODECS, {"size": [0, *[2**32 - 1] * 3], "buffer": b""}, "a shape that torch"),
        (CODECS, {"size": [1] * 100_000}, "a shape that torch"),
        (CODECS, {"buffer": b""}, "bytes where its shape takes"),
        (LOSSY, {"dtype": "int64"}, "is not taken"),
        (["none"], {"dtype": "bool", "buffer": b"\0\1\2\1"}, "neither true nor false"),
        (["float16"], {"buffer": np.int16(999).tobytes() + bytes(8)}, "a scale that"),
        (["float16"], {"buffer": b"\0\0\xff\xff" + bytes(6)}, "not finite"),
        (["uniform8", "blockwise8"], {"buffer": np.float32(np.nan).tobytes() + bytes(4)}, "not finite"),
        (["uniform8", "blockwise8"], {"buffer": np.float32(np.inf).tobytes() + b"\1" * 4}, "not finite"),
        (["blockwise4"], {"buffer": b"\x80\x7f\xff\xff"}, "not finite"),
        (["blockwise4"], {"buffer": b"\xc0\x7f\xff\xff"}, "not finite"),
    ],
)
def test_malformed_message_is_refused(names, changes, words):
    for name in names:
        message = encode(name, torch.ones(4))
        for field in changes:
            message.ClearField(field)
        message.MergeFrom(runtime_pb2.Tensor(**changes))
        with pytest.raises(ValueError, match=words):
            CODECS[name]().extract(message)


def test_codec_number_selects_decoder():
    for name in CODECS:
        message = encode(name, GAUSSIAN[:SOME])
        assert torch.equal(read_tensor(message), CODECS[name]().extract(message))
    for number in (runtime_pb2.MEANSTD_16BIT, runtime_pb2.QUANTILE_8BIT, 99):
        with pytest.raises(ValueError, match=str(number)):
            read_tensor(runtime_pb2.Tensor(compression=number, size=[0], dtype="float32"))


def test_blockwise4_message_matches_documentation():
    tensor = torch.zeros(67)
    tensor[[0, 1, 64, 66]] = torch.tensor([-2.0, -2.0 * 90 / 1024, 3.0, -3.0 * 880 / 1024])
    scales = b"\x00\xc0" + b"\x40\x40"  # the upper halves of -2.0 and 3.0 in float32
    assert encode("blockwise4", tensor).buffer == scales + b"\x8f" + b"\x77" * 31 + b"\x7f" + b"\x70"
    for scale in (1, -1, 2**40, -(2**40)):
        tensor = torch.from_numpy(LEVELS) * scale
        assert torch.equal(there_and_back("blockwise4", tensor), tensor)
