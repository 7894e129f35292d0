"""How tensors become bytes: the codecs that a recipe chooses by name.

docs/wire.md has their bytes and how much each loses.

The lossy codecs reckon in float32 and refuse values that are not finite in it. Every codec gives the same
message for the same values, and again for what that decodes to. 0 stays 0. Of values that lie close together
and far from 0, the lossy ones lose the differences.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2

# Little-endian, as are the machines that torch is built for: values travel in the bytes they have in memory.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
MAX_DIMENSIONS = 64

# Numbers of `CompressionType` after the end of hivemind's enum. An unknown number survives in a message, and
# a peer that does not know it raises, where another codec's number would be misread.
BLOCKWISE_4BIT = 6
MOMENTS_8BIT = 7


class Codec(CompressionBase):
    """Encodes tensors, a lossy one in 4, 8 or 16 bits a value, with a scale for each block in a header."""

    compression_type: ClassVar[int]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    bits: ClassVar[int] = 0  # of a value; 0: as many as in memory, and nothing is lost
    block: ClassVar[int] = 1  # values that share a scale: fewer lose less, at more bytes
    scale_bytes: ClassVar[int] = 0

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a tensor of any shape, on any device; it stays unchanged.

        ValueError if the dtype is none of `dtypes`, or a value not finite in float32 and the codec lossy.
        """
        name = f"Part {info.part_index} of tensor {info.key!r}"
        if tensor.dtype not in self.dtypes:
            raise ValueError(f"{name} is {tensor.dtype}, which {type(self).__name__} can't encode.")
        values = tensor.detach().cpu().contiguous().view(-1)
        if self.bits and not _peak(values) <= torch.finfo(torch.float32).max:  # a NaN is not
            raise ValueError(f"{name} has values that are not finite in float32; nothing was encoded.")
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=self._encode(values.float() if self.bits else values) if len(values) else b"",
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode a message that anybody may have made, into a new tensor on the CPU, of its shape and dtype.

        From a lossy codec its values are finite. No memory is taken for more than the buffer can hold.
        ValueError if no such codec makes such a message.
        """
        size = tuple(serialized_tensor.size)
        buffer = serialized_tensor.buffer
        dtype = {str(dtype): dtype for dtype in self.dtypes}.get(f"torch.{serialized_tensor.dtype}")
        if dtype is None:
            raise ValueError(f"A peer sent a tensor of {serialized_tensor.dtype[:20]!r}, which is not taken.")
        # torch counts strides in 64 bits, empty tensors' too.
        if len(size) > MAX_DIMENSIONS or math.prod(length or 1 for length in size) >= 2**63:
            raise ValueError("A peer sent a tensor of a shape that torch does not have.")
        num_values = math.prod(size)
        expected = self.encoded_bytes(num_values, dtype)
        if len(buffer) != expected:
            raise ValueError(f"A peer sent a tensor of {len(buffer)} bytes where its shape takes {expected}.")
        if not num_values:
            return torch.empty(size, dtype=dtype)
        header_bytes = self._header_bytes(num_values)
        content = memoryview(buffer)
        values = self._decode(content[:header_bytes], content[header_bytes:], num_values)
        if not self.bits:
            if dtype is torch.bool and values.amax() > 1:
                raise ValueError("A peer sent a bool that is neither true nor false.")
            return values.view(dtype).reshape(size)
        peak = _peak(values)
        limit = torch.finfo(dtype).max
        if not math.isfinite(peak):
            raise ValueError("A peer sent a tensor with values that are not finite.")
        if peak > limit:  # the largest value of a narrow dtype, rounded up in float32
            values.clamp_(-limit, limit)
        return values.to(dtype).reshape(size)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Say how much of a value's bytes is left, without the header; hivemind cuts parts by it."""
        return self.bits / 8 / info.descriptor.dtype.itemsize if self.bits else 1.0

    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Count the bytes of a message's buffer for a tensor of `num_values` of a dtype."""
        return self._header_bytes(num_values) - (-num_values * (self.bits or 8 * dtype.itemsize) // 8)

    def _header_bytes(self, num_values: int) -> int:
        return self.scale_bytes * -(-num_values // self.block)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Cut a vector into rows of `block` values, the last one filled up with zeros."""
        return torch.nn.functional.pad(values, (0, -values.numel() % self.block)).view(-1, self.block)

    @abstractmethod
    def _encode(self, values: torch.Tensor) -> bytes:
        """Encode a vector of at least one value, which stays unchanged; float32 for a lossy codec."""

    @abstractmethod
    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        """Decode what is as long as it must be into new memory: float32, or a lossless one's bytes."""


class Verbatim(Codec):
    """Sends the bytes of the values themselves; what is not finite passes as it is."""

    compression_type = runtime_pb2.NONE
    dtypes = DTYPES

    def _encode(self, values: torch.Tensor) -> bytes:
        return values.view(torch.uint8).numpy().tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        return _vector(codes, torch.uint8)


class Half(Codec):
    """Half precision, after a power of two has brought the part's largest magnitude M to [2^14, 2^15).

    A value of magnitude M / 2^28 or more has a relative error of at most 2^-11, any other an absolute one of
    at most M / 2^39. Of bfloat16 nothing is lost down to M / 2^31.
    """

    compression_type = runtime_pb2.FLOAT16
    bits = 16
    block = 2**63
    scale_bytes = 2

    # float32 ends at 2^128, and 2^-127 would be subnormal there. Its smallest value, 2^-149, is above the
    # smallest one of half precision when multiplied by 2^126.
    MIN_SHIFT = 15 - 128
    MAX_SHIFT = 126
    BELOW_2_15 = 2.0**15 - 2.0**4  # the last number of half precision below 2^15

    def _encode(self, values: torch.Tensor) -> bytes:
        shift = min(15 - math.frexp(_peak(values))[1], self.MAX_SHIFT)
        scaled = values * 2.0**shift
        if shift == self.MIN_SHIFT:  # what is rounded up to 2^15 here would be infinite in float32
            scaled.clamp_(-self.BELOW_2_15, self.BELOW_2_15)
        return np.int16(shift).tobytes() + scaled.half().numpy().tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        shift = int(np.frombuffer(header, np.int16)[0])
        if not self.MIN_SHIFT <= shift <= self.MAX_SHIFT:
            raise ValueError("A peer sent a tensor with a scale that float32 does not have.")
        return _vector(codes, torch.float16).float().mul_(2.0**-shift)


class UniformBlocks(Codec):
    """Steps of one size: an error of at most 1/254 of a block's largest magnitude, for every value.

    The largest is coded as 127 or -127 and exact: so the codec is idempotent. 0 stays 0: an embedding's row
    that had no gradient would move under Adam by any other number as much as the rest.
    """

    compression_type = runtime_pb2.UNIFORM_8BIT
    bits = 8
    block = 1024
    scale_bytes = 4

    def _encode(self, values: torch.Tensor) -> bytes:
        blocks = self._blocks(values)
        peaks = blocks.abs().amax(1, keepdim=True)
        codes = self._to_codes(blocks / torch.where(peaks > 0, peaks, 1)).to(torch.int8)
        return peaks.numpy().tobytes() + codes.view(-1)[: values.numel()].numpy().tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        units = self._to_units(self._blocks(_vector(codes, torch.int8)).float().div_(127))
        return units.mul_(_vector(header, torch.float32).view(-1, 1)).view(-1)[:num_values]

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        """Map [-1, 1] to whole numbers from -127 to 127, in place."""
        return units.mul_(127).round_()

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        """Map codes, divided by 127, to [-1, 1], in place."""
        return codes


class CompandedBlocks(UniformBlocks):
    """Steps that grow with the square root of a value x: an error of sqrt(M |x|) / 127, and M / 64516 at 0.

    Steps lose least if they are as wide as density^(-1/3) (Panter and Dite 1951): wide where values are few.
    The square root loses no more than equal steps do of a Gaussian, and a third of it of heavy tails.
    """

    compression_type = runtime_pb2.BLOCKWISE_8BIT
    block = 256

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return units.abs().sqrt_().mul_(127).round_().copysign_(units)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.mul_(codes.abs())


class MomentBlocks(CompandedBlocks):
    """Encodes second moments v >= 0 of an optimizer; sqrt(v) loses what `CompandedBlocks` loses of it.

    An optimizer divides by sqrt(v). Therefore nothing above 0 becomes 0: what is less than the smallest code,
    M / 127^4 = 3.8e-9 M, is raised to that, which makes steps of that weight shorter, never longer.
    """

    compression_type = MOMENTS_8BIT

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return super()._to_codes(units.sqrt()).clamp_(min=1).mul_(units > 0)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return super()._to_units(codes).square_()


# What the codes 0 to 15 of blockwise4 stand for, in parts of a block's scale. Levels lose least of a density
# if they are quantiles of its cube root (Panter and Dite 1951), of a normal one sqrt(3) times as wide:
#     inv_cdf(1/2 + t * (cdf(a) - 1/2)) / a    for t = i / 8, i = 0 .. 8, and t = -i / 7.5, i = 1 .. 7
# with a = peak / (sqrt(3) * sigma) = 1.6: the peak of 64 normal values is 2.6 sigma, other peaks are higher.
LEVELS = np.array(
    [-880, -680, -531, -407, -296, -193, -96, 0, 90, 181, 276, 378, 490, 621, 783, 1024], np.float32
) / np.float32(1024)

CELLS = 127  # half as many as [-1, 1] is cut into, to look up a code by a byte

# The nearest level's code for the middle of each cell, by the cell's number; the last is never used.
MIDDLES = (np.arange(256)[:, None] - CELLS) / CELLS
CODE_OF_CELL = bytes(np.abs(LEVELS[None] - MIDDLES).argmin(1).astype(np.uint8))

# The two levels that a byte of two codes stands for.
LEVEL_PAIRS = torch.from_numpy(LEVELS[np.stack([np.arange(256) % 16, np.arange(256) // 16], 1)])


class NormalBlocks(Codec):
    """Divides each block by its value of largest magnitude, sign included; sends the nearest of 16 levels.

    An error is at most 0.15 of a block's largest magnitude, and in the root mean square a tenth of the
    values: for gradients and pseudo-gradients, with error feedback.
    """

    compression_type = BLOCKWISE_4BIT
    bits = 4
    block = 64
    scale_bytes = 2

    def _encode(self, values: torch.Tensor) -> bytes:
        blocks = self._blocks(values)
        low, high = torch.aminmax(blocks, dim=1, keepdim=True)
        # In bfloat16, which has the range of float32 but for its last 0.4 %.
        limit = torch.finfo(torch.bfloat16).max
        scales = torch.where(high >= -low, high, low).clamp_(-limit, limit).bfloat16()
        units = blocks / torch.where(scales != 0, scales, 1).float()
        # A sixth of what `torch.bucketize` takes.
        cells = units.clamp_(-1, 1).mul_(CELLS).add_(CELLS + 0.5).to(torch.uint8)
        codes = np.frombuffer(cells.numpy().tobytes().translate(CODE_OF_CELL), np.uint16)
        packed = (codes | codes >> 4).astype(np.uint8)[: (values.numel() + 1) // 2]
        return scales.view(torch.int16).numpy().tobytes() + packed.tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        units = self._blocks(LEVEL_PAIRS.index_select(0, _vector(codes, torch.uint8).int()).view(-1))
        return units.mul_(_vector(header, torch.bfloat16).float().view(-1, 1)).view(-1)[:num_values]


CODECS: dict[str, Callable[[], Codec]] = {
    "none": Verbatim,
    "float16": Half,
    "uniform8": UniformBlocks,
    "blockwise8": CompandedBlocks,
    "blockwise4": NormalBlocks,
}


class EightBitStatistics(MomentBlocks):
    """Encodes large float32 statistics of an optimizer in 8 bits, for a download; all else as it is.

    Signed ones (first moments) by blockwise8: what is near 0 stays near 0, or is four times as large at most.
    Others are second moments. Only where peers need not hold the same, as in modes with local steps:
    elsewhere the joiner's weights would drift away.
    """

    SMALLEST = 4096  # values; smaller tensors weigh nothing

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """See `Codec.compress`; what is not finite in float32 is kept, too."""
        is_large = tensor.dtype == torch.float32 and tensor.numel() >= self.SMALLEST
        if not is_large or not bool(tensor.isfinite().all()):
            return Verbatim().compress(tensor, info)
        if bool((tensor < 0).any()):
            return CompandedBlocks().compress(tensor, info)
        return super().compress(tensor, info)


BY_NUMBER: dict[int, Codec] = {
    codec.compression_type: codec for codec in (*(make() for make in CODECS.values()), MomentBlocks())
}
"""The codecs that a message may name by its number; the last one only in the state of an optimizer."""


def read_tensor(message: runtime_pb2.Tensor) -> torch.Tensor:
    """Decode a message that anybody may have made; see `Codec.extract`, also for what it raises.

    hivemind's codecs believe what a message says of its dtype and size, and raise under numpy 2.4.
    """
    if (codec := BY_NUMBER.get(message.compression)) is None:
        raise ValueError(f"A peer sent a tensor in a codec of number {message.compression}: it is not taken.")
    return codec.extract(message)


def _peak(values: torch.Tensor) -> float:
    """Find the largest magnitude, 0 of no values; NaN if there is one."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _vector(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Read a vector into memory of its own."""
    return torch.frombuffer(bytearray(buffer), dtype=dtype)
