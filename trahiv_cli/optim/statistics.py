"""A codec for the inner optimizer's state in a download, where no two peers need hold the same.

In modes with local steps every peer has statistics of its own, and a joiner only needs good ones to begin
with. In the others all peers step alike: what a codec takes from one peer's statistics would drive its
weights away. Only a peer that holds its state alone can round its own and give what is left.
"""

from __future__ import annotations

import torch
from hivemind.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor
from hivemind.proto import runtime_pb2

from trahiv_cli.optim.codecs import Codec, CompandedBlocks, MomentBlocks, Verbatim

SMALLEST = 4096
"""Values; smaller tensors weigh nothing."""


class EightBitStatistics(CompressionBase):
    """Encodes large float32 statistics in 8 bits; step counts, bytes of 8-bit optimizers and all else as is.

    Signed ones (first moments) by blockwise8: what is near 0 stays near 0, or is four times as large at most.
    Those without a negative value (second moments) by `MomentBlocks`, which makes no 0 of them: an optimizer
    divides by their root.
    """

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """See `Codec.compress`; what is not finite in float32 is kept, too."""
        codec: Codec = Verbatim()
        if self.is_lossy_for(tensor):
            codec = CompandedBlocks() if bool((tensor < 0).any()) else MomentBlocks()
        return codec.compress(tensor, info)

    def is_lossy_for(self, tensor: torch.Tensor) -> bool:
        """Whether it encodes a tensor in 8 bits, rather than as it is."""
        is_large = tensor.dtype == torch.float32 and tensor.numel() >= SMALLEST
        return is_large and bool(tensor.isfinite().all())

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """See `Codec.extract`."""
        return deserialize_torch_tensor(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Give 1: no parts are cut by it."""
        return 1.0
