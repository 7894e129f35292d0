"""Codecs that encode tensors as bytes; a recipe chooses them by name.

docs/protocol.md describes their formats and losses.

Lossy codecs compute in float32 and refuse values that are not finite in it. Every codec is deterministic, and
idempotent: encoding a decoded message again gives the same message. 0 stays 0. Lossy codecs lose the
differences between values that lie close together and far from 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2

# Values travel as their bytes in memory: little-endian, like every machine that torch is built for.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_shape(size: Sequence[int]) -> bool:
    """Whether torch can have a tensor of this shape: it counts strides in 64 bits, also of empty tensors."""
    return len(size) <= 64 and math.prod(length or 1 for length in size) < 2**63


class Codec(CompressionBase):
    """A tensor codec. A lossy one uses 4, 8 or 16 bits per value, and a header with a scale per block.

    Some have a `compression_type` beyond hivemind's enum. protobuf keeps an unknown number, so a peer that
    lacks the codec raises an error; with the number of another codec it would misread the message.
    """

    compression_type: ClassVar[int]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = FLOATS
    bits: ClassVar[int] = 0  # bits per value; 0: as many as in memory, without loss
    block: ClassVar[int] = 1  # values that share a scale; smaller blocks lose less and need more bytes
    scale_bytes: ClassVar[int] = 0

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Encode a tensor of any shape, on any device, without changing it.

        Raises ValueError if the dtype is not in `dtypes`, or if the codec is lossy and a value is not finite
        in float32.
        """
        name = f"Part {info.part_index} of tensor {info.key!r}"
        if tensor.dtype not in self.dtypes:
            raise ValueError(f"{name} is {tensor.dtype}, which {type(self).__name__} can't encode.")
        values = tensor.detach().cpu().contiguous().view(-1)
        if self.bits and not _peak(values) <= torch.finfo(torch.float32).max:  # also true for NaN
            raise ValueError(f"{name} has values that are not finite in float32; nothing was encoded.")
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=self._encode(values.float() if self.bits else values) if len(values) else b"",
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Decode an untrusted message into a new tensor on the CPU, with the message's shape and dtype.

        Values from a lossy codec are finite. No more memory is allocated than the buffer can fill. Raises
        ValueError if this codec cannot have made the message.
        """
        size = tuple(serialized_tensor.size)
        buffer = serialized_tensor.buffer
        dtype = {str(dtype): dtype for dtype in self.dtypes}.get(f"torch.{serialized_tensor.dtype}")
        if dtype is None:
            raise ValueError(f"A peer sent a tensor of {serialized_tensor.dtype[:20]!r}, which is not taken.")
        if not is_shape(size):
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
        """Return the encoded bytes per original byte, without the header; hivemind sizes parts with it."""
        return self.bits / 8 / info.descriptor.dtype.itemsize if self.bits else 1.0

    def encoded_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        """Return the length in bytes of the encoded buffer of a tensor with `num_values` values."""
        return self._header_bytes(num_values) - (-num_values * (self.bits or 8 * dtype.itemsize) // 8)

    def _header_bytes(self, num_values: int) -> int:
        return self.scale_bytes * -(-num_values // self.block)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Cut a vector into rows of `block` values, and pad the last row with zeros."""
        return torch.nn.functional.pad(values, (0, -values.numel() % self.block)).view(-1, self.block)

    @abstractmethod
    def _encode(self, values: torch.Tensor) -> bytes:
        """Encode a vector of at least one value (float32 for a lossy codec) without changing it."""

    @abstractmethod
    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        """Decode a buffer of the right length into new memory: float32, or the bytes of a lossless codec."""


class Verbatim(Codec):
    """Sends the bytes of the values unchanged, also of values that are not finite."""

    compression_type = runtime_pb2.NONE
    dtypes = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)

    def _encode(self, values: torch.Tensor) -> bytes:
        return values.view(torch.uint8).numpy().tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        return _vector(codes, torch.uint8)


class Half(Codec):
    """Half precision, after a power of two has scaled the part's largest magnitude M into [2^14, 2^15).

    A value of magnitude M / 2^28 or more has a relative error of at most 2^-11; any other value has an
    absolute error of at most M / 2^39. bfloat16 values of magnitude M / 2^31 or more are exact.
    """

    compression_type = runtime_pb2.FLOAT16
    bits = 16
    block = 2**63
    scale_bytes = 2

    # float32 ends at 2^128. 2^-127, by which a shift of 127 would be undone, is subnormal in float32. With a
    # shift of 126, float32's smallest value, 2^-149, is above the smallest value of half precision.
    MIN_SHIFT = 15 - 128
    MAX_SHIFT = 126
    BELOW_2_15 = 2.0**15 - 2.0**4  # the last number of half precision below 2^15

    def _encode(self, values: torch.Tensor) -> bytes:
        shift = min(15 - math.frexp(_peak(values))[1], self.MAX_SHIFT)
        scaled = values * 2.0**shift
        if shift == self.MIN_SHIFT:  # a value that is rounded up to 2^15 would decode to infinity
            scaled.clamp_(-self.BELOW_2_15, self.BELOW_2_15)
        return np.int16(shift).tobytes() + scaled.half().numpy().tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        shift = int(np.frombuffer(header, np.int16)[0])
        if not self.MIN_SHIFT <= shift <= self.MAX_SHIFT:
            raise ValueError("A peer sent a tensor with a scale that float32 does not have.")
        return _vector(codes, torch.float16).float().mul_(2.0**-shift)


class UniformBlocks(Codec):
    """Uniform 8-bit quantization, with an error of at most 1/254 of a block's largest magnitude.

    The largest value is coded as 127 or -127, without error, so the codec is idempotent. 0 stays 0: with any
    other value, Adam would move an embedding row that had no gradient as much as the other rows.
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
    """8-bit quantization on a square-root scale: the error at x is sqrt(M |x|) / 127, and M / 64516 at 0.

    M is a block's largest magnitude. The loss is least if the step width is proportional to density^(-1/3)
    (Panter and Dite 1951): wide where values are few. On a Gaussian, a square-root scale loses no more than
    uniform steps; on heavy tails, a third as much.
    """

    compression_type = runtime_pb2.BLOCKWISE_8BIT
    block = 256

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return units.abs().sqrt_().mul_(127).round_().copysign_(units)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.mul_(codes.abs())


class MomentBlocks(CompandedBlocks):
    """Encodes an optimizer's second moments v >= 0; sqrt(v) has the error of `CompandedBlocks`.

    An optimizer divides by sqrt(v), so no value above 0 may become 0. Values below the smallest code,
    M / 127^4 = 3.8e-9 M, are rounded up to it: the steps of those weights become shorter, never longer.
    """

    compression_type = 7

    def _to_codes(self, units: torch.Tensor) -> torch.Tensor:
        return super()._to_codes(units.sqrt()).clamp_(min=1).mul_(units > 0)

    def _to_units(self, codes: torch.Tensor) -> torch.Tensor:
        return super()._to_units(codes).square_()


# The values of the codes 0 to 15 of blockwise4, relative to a block's scale. The loss is least if levels are
# quantiles of the density's cube root (Panter and Dite 1951). The cube root of a normal density is a normal
# one that is sqrt(3) times as wide:
#     inv_cdf(1/2 + t * (cdf(a) - 1/2)) / a    for t = i / 8, i = 0 .. 8, and t = -i / 7.5, i = 1 .. 7
# with a = peak / (sqrt(3) * sigma) = 1.6: the peak of 64 normal values is 2.6 sigma, other densities have
# higher peaks.
LEVELS = np.array(
    [-880, -680, -531, -407, -296, -193, -96, 0, 90, 181, 276, 378, 490, 621, 783, 1024], np.float32
) / np.float32(1024)


class NormalBlocks(Codec):
    """Divides each block by its value of largest magnitude, sign included; sends the nearest of 16 levels.

    The error is at most 0.15 of a block's largest magnitude. Its root mean square is a tenth of the values'.
    The codec is for gradients and pseudo-gradients, with error feedback.
    """

    compression_type = 6
    bits = 4
    block = 64
    scale_bytes = 2

    BYTES = np.arange(256)
    # For each byte, the levels of its two codes.
    LEVEL_PAIRS = torch.from_numpy(LEVELS[np.stack([BYTES % 16, BYTES // 16], 1)])
    # Cells of width 1/127 divide [-1, 1], so that one byte can index them. For each, the code of the level
    # that is nearest to its middle; the last entry is never used.
    CODE_OF_CELL = bytes(np.abs(LEVELS - (BYTES[:, None] - 127) / 127).argmin(1).astype(np.uint8))

    def _encode(self, values: torch.Tensor) -> bytes:
        blocks = self._blocks(values)
        low, high = torch.aminmax(blocks, dim=1, keepdim=True)
        # bfloat16 has the range of float32 except for its last 0.4 %.
        limit = torch.finfo(torch.bfloat16).max
        scales = torch.where(high >= -low, high, low).clamp_(-limit, limit).bfloat16()
        units = blocks / torch.where(scales != 0, scales, 1).float()
        # This takes a sixth of the time of `torch.bucketize`.
        cells = units.clamp_(-1, 1).mul_(127).add_(127.5).to(torch.uint8)
        codes = np.frombuffer(cells.numpy().tobytes().translate(self.CODE_OF_CELL), np.uint16)
        packed = (codes | codes >> 4).astype(np.uint8)[: (values.numel() + 1) // 2]
        return scales.view(torch.int16).numpy().tobytes() + packed.tobytes()

    def _decode(self, header: memoryview, codes: memoryview, num_values: int) -> torch.Tensor:
        units = self._blocks(self.LEVEL_PAIRS.index_select(0, _vector(codes, torch.uint8).int()).view(-1))
        return units.mul_(_vector(header, torch.bfloat16).float().view(-1, 1)).view(-1)[:num_values]


CODECS: dict[str, Callable[[], Codec]] = {
    "none": Verbatim,
    "float16": Half,
    "uniform8": UniformBlocks,
    "blockwise8": CompandedBlocks,
    "blockwise4": NormalBlocks,
}


class EightBitStatistics(MomentBlocks):
    """Encodes an optimizer's large float32 statistics in 8 bits for downloads, other tensors verbatim.

    Signed tensors (first moments) use blockwise8: a value near 0 stays near 0, or grows at most by a factor
    of four. Other tensors are second moments. It suits only modes with local steps, where peers need not have
    equal optimizer states: in other modes the joiner's weights would drift away.
    """

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """See `Codec.compress`; a tensor with values that are not finite is sent verbatim."""
        is_large = tensor.dtype == torch.float32 and tensor.numel() >= 4096  # smaller ones add few bytes
        if not is_large or not bool(tensor.isfinite().all()):
            return Verbatim().compress(tensor, info)
        if bool((tensor < 0).any()):
            return CompandedBlocks().compress(tensor, info)
        return super().compress(tensor, info)


BY_NUMBER: dict[int, Codec] = {
    codec.compression_type: codec for codec in (*(make() for make in CODECS.values()), MomentBlocks())
}
"""Codecs by the number in a message; the last one occurs only in an optimizer's state."""


def read_tensor(message: runtime_pb2.Tensor) -> torch.Tensor:
    """Decode an untrusted message. Raises ValueError as `Codec.extract` does, and for an unknown codec.

    hivemind's codecs trust the dtype and size in a message, and fail under numpy 2.4.
    """
    if (codec := BY_NUMBER.get(message.compression)) is None:
        raise ValueError(f"A peer sent a tensor in a codec of number {message.compression}: it is not taken.")
    return codec.extract(message)


def _peak(values: torch.Tensor) -> float:
    """Return the largest magnitude; 0 if there are no values, NaN if one of them is NaN."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _vector(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Copy a buffer into a new vector."""
    return torch.frombuffer(bytearray(buffer), dtype=dtype)
