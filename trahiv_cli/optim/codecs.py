"""How tensors become bytes: the codecs that a recipe chooses by name.

| name       | bytes per value | Gaussian | heavy tails | 6 decades | encoded again  |
|------------|-----------------|----------|-------------|-----------|----------------|
| none       | as in memory    | 0        | 0           | 0         | the same       |
| float16    | 2               | 2.1e-4   | 2.1e-4      | 2.2e-4    | the same       |
| uniform8   | 1 + 4/1024      | 7.8e-3   | 2.7e-2      | 8.5e-3    | the same       |
| blockwise8 | 1 + 4/256       | 7.0e-3   | 9.1e-3      | 6.1e-3    | the same       |
| blockwise4 | 1/2 + 2/64      | 8.6e-2   | 1.3e-1      | 8.5e-2    | the same       |

What is lost is the root mean square of the error over that of the values, in parts of 131072 float32 values:
normal ones, Student's t with 3 degrees of freedom, and magnitudes uniform in log from 1e-8 to 1e-2. The last
column is for what a message of the same codec decoded to.

The lossy codecs reckon in float32 and refuse values that are not finite in it: no code stands for them, so
they would arrive as something else. Every codec gives the same message for the same values, however often,
and an empty buffer for an empty tensor. 0 stays 0. Of values that lie close together and far from 0, the
lossy ones keep the values and lose their differences.

Not here: which tensors are encoded, and how often (`rounds.py`, `assemble.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from hivemind.compression import CompressionBase, CompressionInfo, serialization
from hivemind.proto import runtime_pb2

# Little-endian, as are the machines that torch is built for: values travel in the bytes they have in memory.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
MAX_DIMENSIONS = 64

LARGEST = torch.finfo(torch.float32).max

MIN_SHIFT, MAX_SHIFT = 15 - 128, 126
"""Powers of two by which `Half` multiplies: float32 ends at 2^128, and 2^-127 would be subnormal there.

float32's smallest value, 2^-149, is above the smallest one of half precision when multiplied by 2^126.
"""

BELOW_2_15 = 2.0**15 - 2.0**4
"""The last number of half precision below 2^15."""

LEVELS = np.array(
    [-880, -680, -531, -407, -296, -193, -96, 0, 90, 181, 276, 378, 490, 621, 783, 1024], np.float32
) / np.float32(1024)
"""What the codes 0 to 15 of blockwise4 stand for, in parts of a block's scale; 7 stands for 0."""

CELLS = 127
"""Half as many as `NormalBlocks` cuts [-1, 1] into, to look up a code by a byte."""

CODE_OF_CELL = bytes(
    np.abs(LEVELS[None] - ((np.arange(256) - CELLS) / CELLS)[:, None]).argmin(1).astype(np.uint8)
)
"""The nearest level's code for the middle of each cell, by the cell's number; the last is never used."""

LEVEL_PAIRS = torch.from_numpy(LEVELS[np.stack([np.arange(256) % 16, np.arange(256) // 16], 1)])
"""The two levels, float32, that a byte of two codes stands for."""

BLOCKWISE_4BIT, MOMENTS_8BIT = 6, 7
"""Numbers of `CompressionType` after the end of hivemind's enum. An unknown number survives in a message
(enums of proto3 are open), and a peer that does not know it raises, where another codec's number would be
misread."""


class Codec(CompressionBase):
    """Encodes a tensor into a message and decodes messages; has no state."""

    compression_type: ClassVar[int]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    is_lossless: ClassVar[bool]

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a tensor.

        Args:
            tensor: of any shape, on any device, of one of `dtypes`; unchanged.
            info: names the tensor in errors.
            allow_inplace: hivemind's leave to overwrite `tensor`; no use is made of it.

        Returns:
            A message with the shape and dtype of `tensor`.

        Raises:
            ValueError: the dtype is none of `dtypes`, or the codec is lossy and a value is not finite in
                float32; nothing was encoded.
        """
        if tensor.dtype not in self.dtypes:
            raise ValueError(f"{_name(info)} is {tensor.dtype}, which {type(self).__name__} can't encode.")
        values = tensor.detach().cpu().contiguous().view(-1)
        if not (self.is_lossless or _peak(values) <= LARGEST):  # a NaN is not
            raise ValueError(f"{_name(info)} has values that are not finite in float32; nothing was encoded.")
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=self._encode(values) if values.numel() else b"",
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode a message that anybody may have made.

        Returns:
            A tensor in memory of its own, on the CPU, of the message's shape and dtype. From a lossy codec
            its values are finite.

        Raises:
            ValueError: no such codec makes such a message. What it says of itself is held against the length
                of its buffer before memory is taken.
        """
        size, buffer = tuple(serialized_tensor.size), serialized_tensor.buffer
        dtype = {str(dtype): dtype for dtype in self.dtypes}.get(f"torch.{serialized_tensor.dtype}")
        if dtype is None:
            raise ValueError(f"A peer sent a tensor of {serialized_tensor.dtype[:20]!r}, which is not taken.")
        if serialized_tensor.requires_grad and not dtype.is_floating_point:
            raise ValueError("A peer sent a tensor of integers with a gradient.")
        # torch counts strides in 64 bits, empty tensors' too.
        if len(size) > MAX_DIMENSIONS or math.prod(length or 1 for length in size) >= 2**63:
            raise ValueError("A peer sent a tensor of a shape that torch does not have.")
        num_values = math.prod(size)
        expected = self.encoded_bytes(num_values, dtype)
        if len(buffer) != expected:
            raise ValueError(f"A peer sent a tensor of {len(buffer)} bytes where its shape takes {expected}.")
        if not num_values:
            return torch.empty(size, dtype=dtype)
        return self._decode(buffer, num_values, dtype).reshape(size)

    @abstractmethod
    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Count the bytes of a message's buffer for a tensor of `num_values` of a dtype."""

    @abstractmethod
    def _encode(self, values: torch.Tensor) -> bytes:
        """Encode a vector of at least one value, which stays unchanged."""

    @abstractmethod
    def _decode(self, buffer: bytes, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode a vector of at least one value from a buffer of the right length."""


class Verbatim(Codec):
    """Sends the bytes of the values themselves, little-endian; what is not finite passes as it is."""

    compression_type = runtime_pb2.NONE
    dtypes = DTYPES
    is_lossless = True

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Give 1: a value keeps its bytes."""
        return 1.0

    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """See `Codec.encoded_bytes`."""
        return num_values * dtype.itemsize

    def _encode(self, values: torch.Tensor) -> bytes:
        return values.view(torch.uint8).numpy().tobytes()

    def _decode(self, buffer: bytes, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        octets = _codes(buffer, torch.uint8)
        if dtype is torch.bool and octets.amax() > 1:
            raise ValueError("A peer sent a bool that is neither true nor false.")
        return octets.view(dtype)


class Lossy(Codec):
    """Encodes a value in 4, 8 or 16 bits, and a header for all; floats only."""

    dtypes = FLOATS
    is_lossless = False
    bits: ClassVar[int]

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Say how much of a value's bytes is left, without the header; hivemind cuts parts by it."""
        return self.bits / 8 / info.descriptor.dtype.itemsize

    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """See `Codec.encoded_bytes`; the dtype makes no difference."""
        return -(-num_values * self.bits // 8) + self._header_bytes(num_values) if num_values else 0

    def _encode(self, values: torch.Tensor) -> bytes:
        header, codes = self._quantize(values.float())
        return header + codes.numpy().tobytes()

    def _decode(self, buffer: bytes, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        values = self._dequantize(buffer, num_values)
        peak, limit = _peak(values), torch.finfo(dtype).max
        if not math.isfinite(peak):
            raise ValueError("A peer sent a tensor with values that are not finite.")
        if peak > limit:  # the largest value of a narrow dtype, rounded up in float32
            values.clamp_(-limit, limit)
        return values.to(dtype)

    @abstractmethod
    def _header_bytes(self, num_values: int) -> int:
        """Count the bytes of the header of a vector."""

    @abstractmethod
    def _quantize(self, values: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        """Give the header, and the codes of the finite float32 values, which stay unchanged."""

    @abstractmethod
    def _dequantize(self, buffer: bytes, num_values: int) -> torch.Tensor:
        """Give the float32 values of a buffer, in memory of their own."""


class Half(Lossy):
    """Half precision, after a power of two has brought the part's largest magnitude M to [2^14, 2^15).

    Half precision (IEEE 754 binary16) has 11 significant bits from 2^-14 on and steps of 2^-24 below. So a
    value of magnitude M / 2^28 or more has a relative error of at most 2^-11 = 4.9e-4, any other an absolute
    one of at most M / 2^39: nothing above 1.9e-12 M becomes 0. Of bfloat16, which has 8 significant bits,
    nothing is lost down to M / 2^31.
    """

    compression_type = runtime_pb2.FLOAT16
    bits = 16

    def _header_bytes(self, num_values: int) -> int:
        return 2

    def _quantize(self, values: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        shift = min(15 - math.frexp(_peak(values))[1], MAX_SHIFT)
        scaled = values * 2.0**shift
        if shift == MIN_SHIFT:  # what is rounded up to 2^15 here would be infinite in float32
            scaled.clamp_(-BELOW_2_15, BELOW_2_15)
        return np.int16(shift).tobytes(), scaled.half()

    def _dequantize(self, buffer: bytes, num_values: int) -> torch.Tensor:
        shift = int(np.frombuffer(buffer, np.int16, 1)[0])
        if not MIN_SHIFT <= shift <= MAX_SHIFT:
            raise ValueError("A peer sent a tensor with a scale that float32 does not have.")
        return _codes(buffer, torch.float16, offset=2).float().mul_(2.0**-shift)


class Blocks(Lossy):
    """Cuts a part into blocks and divides each by its own largest magnitude, which goes into the header.

    One large value costs the precision of its own block alone. There is nothing to clip and no table to look
    up, and the largest value of a block, coded as 127 or -127, is exact: therefore the codec is idempotent.
    """

    bits = 8
    block: ClassVar[int]
    """Values that share a scale: fewer lose less, at 4 bytes more a block."""

    def _header_bytes(self, num_values: int) -> int:
        return 4 * -(-num_values // self.block)

    def _quantize(self, values: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        num_values = values.numel()
        blocks = torch.nn.functional.pad(values, (0, -num_values % self.block)).view(-1, self.block)
        peaks = blocks.abs().amax(1, keepdim=True)
        codes = self._to_codes(blocks / torch.where(peaks > 0, peaks, 1)).to(torch.int8)
        return peaks.numpy().tobytes(), codes.view(-1)[:num_values]

    def _dequantize(self, buffer: bytes, num_values: int) -> torch.Tensor:
        header_bytes = self._header_bytes(num_values)
        peaks = _codes(buffer[:header_bytes], torch.float32).view(-1, 1)
        codes = torch.nn.functional.pad(
            _codes(buffer, torch.int8, offset=header_bytes), (0, -num_values % self.block)
        )
        units = self._to_units(codes.view(-1, self.block).float().div_(127))
        return units.mul_(peaks).view(-1)[:num_values]

    @abstractmethod
    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        """Map [-1, 1] to whole numbers from -127 to 127, in place."""

    @abstractmethod
    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        """Map codes, divided by 127, to [-1, 1], in place."""


class UniformBlocks(Blocks):
    """Steps of one size: an error of at most 1/254 of a block's largest magnitude, for every value.

    Symmetric, as gradients have hardly a mean, and so that 0 stays 0: an embedding's row that had no gradient
    would move under Adam by any other number as much as the rest. The block is long because a Gaussian's
    largest magnitude grows slowly with it: 3.1 sigma of 256 values, 3.4 of 1024.
    """

    compression_type = runtime_pb2.UNIFORM_8BIT
    block = 1024

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return units.mul_(127).round_()

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return codes


class CompandedBlocks(Blocks):
    """Steps that grow with the square root of a value x: an error of sqrt(M |x|) / 127, and M / 64516 at 0.

    Steps lose least if they are as wide as density^(-1/3) (Panter and Dite 1951): wide where values are few.
    The square root loses no more than equal steps do of a Gaussian, a third of it of heavy tails, takes no
    table, and tells values from 0 down to M / 64516, where equal steps end at M / 254.
    """

    compression_type = runtime_pb2.BLOCKWISE_8BIT
    block = 256

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return units.abs().sqrt_().mul_(127).round_().copysign_(units)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.mul_(codes.abs())


class MomentBlocks(CompandedBlocks):
    """Encodes second moments v >= 0 of an optimizer; sqrt(v) loses what `CompandedBlocks` loses of it.

    An optimizer divides by sqrt(v). Therefore nothing above 0 becomes 0 (unless M is below 4e-37, where
    float32 ends): the smallest code stands for M / 127^4 = 3.8e-9 M, and what is less is raised to that,
    which makes the steps of that weight shorter for a while and never longer.
    """

    compression_type = MOMENTS_8BIT

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return super()._to_codes(units.sqrt()).clamp_(min=1).mul_(units > 0)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return super()._to_units(codes).square_()


class NormalBlocks(Lossy):
    """Divides each block by its value of largest magnitude, sign included; sends the nearest of 16 levels.

    So that value is level 1, and the opposite side, where the block has none as large, makes do with seven
    levels. An error is at most 0.15 of a block's largest magnitude, and in the root mean square a tenth of
    the values: for gradients and pseudo-gradients, with error feedback.

    Levels lose least of a density if they are quantiles of its cube root (Panter and Dite 1951). A normal
    density's cube root is normal, sqrt(3) times as wide, so the levels are

        inv_cdf(1/2 + t * (cdf(a) - 1/2)) / a    for t = i / 8, i = 1 .. 8, and t = -i / 7.5, i = 1 .. 7

    with a = peak / (sqrt(3) * sigma) = 1.6, rounded to 1/1024. The peak of 64 normal values is 2.6 sigma, of
    pseudo-gradients and heavier tails more. Lost of the pseudo-gradients of AdamW after 10, 50 and 100 steps
    (a transformer of 0.5M parameters, on text; blocks of 64 with a signed scale):

        levels                    10 steps   50       100      Gaussian   heavy tails
        these                     8.6e-2     7.8e-2   8.8e-2   8.6e-2     1.26e-1
        NF4 (arXiv 2305.14314)    9.1e-2     9.1e-2   9.4e-2   9.2e-2     1.23e-1
        equal steps               9.4e-2     7.5e-2   1.0e-1   9.5e-2     1.60e-1
        steps as of blockwise8    1.05e-1    1.0e-1   1.07e-1  1.07e-1    1.12e-1

    A block of 32 loses 7 % less than one of 64, at 6 % more bytes; one of 128 loses 6 % more, 23 % of heavy
    tails, at 3 % fewer bytes.
    """

    compression_type = BLOCKWISE_4BIT
    bits = 4
    block = 64

    def _header_bytes(self, num_values: int) -> int:
        return 2 * -(-num_values // self.block)

    def _quantize(self, values: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        num_values = values.numel()
        blocks = torch.nn.functional.pad(values, (0, -num_values % self.block)).view(-1, self.block)
        low, high = torch.aminmax(blocks, dim=1, keepdim=True)
        # In bfloat16, which has the range of float32 but for its last 0.4 %.
        limit = torch.finfo(torch.bfloat16).max
        scales = torch.where(high >= -low, high, low).clamp_(-limit, limit).bfloat16()
        units = blocks / torch.where(scales != 0, scales, 1).float()
        cells = units.clamp_(-1, 1).mul_(CELLS).add_(CELLS + 0.5).to(torch.uint8)
        codes = np.frombuffer(cells.numpy().tobytes().translate(CODE_OF_CELL), np.uint16)
        packed = (codes | codes >> 4).astype(np.uint8)[: (num_values + 1) // 2]
        return scales.view(torch.int16).numpy().tobytes(), torch.from_numpy(packed)

    def _dequantize(self, buffer: bytes, num_values: int) -> torch.Tensor:
        header_bytes = self._header_bytes(num_values)
        scales = _codes(buffer[:header_bytes], torch.bfloat16).float().view(-1, 1)
        packed = _codes(buffer, torch.uint8, offset=header_bytes)
        packed = torch.nn.functional.pad(packed, (0, -packed.numel() % (self.block // 2)))
        units = LEVEL_PAIRS.index_select(0, packed.int()).view(-1, self.block)
        return units.mul_(scales).view(-1)[:num_values]


CODECS: dict[str, Callable[[], Codec]] = {
    "none": Verbatim,
    "float16": Half,
    "uniform8": UniformBlocks,
    "blockwise8": CompandedBlocks,
    "blockwise4": NormalBlocks,
}


NAMES: dict[int, str] = {codec().compression_type: name for name, codec in CODECS.items()} | {
    MOMENTS_8BIT: "moments8"
}
"""By the number in a message; `moments8` is only for the state of an optimizer (`statistics.py`)."""


class _CompressionTypes(EnumTypeWrapper):
    """The enum `CompressionType` of hivemind, with our names of its numbers."""

    def Name(self, number: int) -> str:
        if number not in NAMES:
            raise ValueError(f"A peer sent a tensor in a codec with the number {number}, which is not taken.")
        return NAMES[number]


def register() -> None:
    """Have hivemind decode every message with these codecs, in place of its own. Not undone by a second call.

    Its own believe what a message says of its dtype and size, encode what is not finite as something else,
    and raise under numpy 2.4. hivemind looks them up by a name, which its enum gives a number. A second
    averager of the DHT's process registers them while the first one decodes.
    """
    if isinstance(runtime_pb2.CompressionType, _CompressionTypes):
        return
    ours = {name: codec() for name, codec in CODECS.items()} | {NAMES[MOMENTS_8BIT]: MomentBlocks()}
    serialization._BASE_COMPRESSION_TYPES = ours
    runtime_pb2.CompressionType = _CompressionTypes(runtime_pb2.CompressionType.DESCRIPTOR)


def encode_with_residual(
    codec: Codec, tensor: torch.Tensor, info: CompressionInfo
) -> tuple[runtime_pb2.Tensor, torch.Tensor]:
    """Encode a tensor, and say what was lost: added to the next tensor, it is sent after all.

    So the mean of n messages differs from the mean of n tensors by the last loss / n, and not by a bias.

    Args:
        codec: encodes.
        tensor: floating-point, on any device; unchanged.
        info: names the tensor in errors.

    Returns:
        The message, and `tensor` minus what the message decodes to, in the shape, dtype and device of
        `tensor`. Of a lossless codec that is one zero, expanded: it takes no memory and can't be written to.

    Raises:
        ValueError: see `Codec.compress`.

    Source: error feedback, arXiv 1901.09847.
    """
    message = codec.compress(tensor, info)
    if codec.is_lossless:
        return message, tensor.new_zeros(()).expand_as(tensor)
    return message, tensor.detach() - codec.extract(message).to(tensor.device)


def _name(info: CompressionInfo) -> str:
    return f"Part {info.part_index} of tensor {info.key!r}"


def _peak(values: torch.Tensor) -> float:
    """Find the largest magnitude, 0 of no values; NaN if there is one."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _codes(buffer: bytes, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Read a vector from `offset` bytes on, into memory of its own."""
    return torch.frombuffer(bytearray(buffer), dtype=dtype, offset=offset)
