"""What a decoder is built from: layers that a tensor axis, 1D or 2D, hands out, each rank with its piece of them."""

from typing import Protocol

from torch import Tensor, nn

from shoal.comm.ledger import Ledger
from shoal.kernels.dropout import DropoutKey


class Layers(Protocol):
    """The layers of one rank. axes/tensor has them for ranks in a row (one rank: plain layers), axes/tensor2d for grids.

    heads, kv_heads, ffn: of this rank. width: features of hidden that lie on this rank between layer pairs.
    norm_is_local: whether a norm asks no other rank.
    """

    heads: int
    kv_heads: int
    ffn: int

    @property
    def width(self) -> int: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def norm_is_local(self) -> bool: ...
    def embedding(self) -> nn.Module:
        """tokens and positions, int64 (b or 1, s) -> the rank's part of (b, s, h)."""
        ...

    def norm(self) -> nn.Module:
        """The norm over hidden."""
        ...

    def column(self, outputs: int, bias: bool) -> nn.Module:
        """From hidden to `outputs` features of this rank."""
        ...

    def row(self, inputs: int, bias: bool) -> nn.Module:
        """From `inputs` features of this rank to hidden."""
        ...

    def head(self) -> nn.Module:
        """(hidden states, tied weight or None, targets or None) -> logits (..., V), or with targets the sum of losses."""
        ...

    def own_samples(self, x: Tensor) -> Tensor:
        """The rank's part of x (b, s) along the batch."""
        ...

    def own_tokens(self, x: Tensor) -> Tensor:
        """The rank's part of x (b, s) as its tokens lie between layer pairs."""
        ...

    def residual(self, b: int, s: int) -> tuple[int, int, int]:
        """The shape of the rank's part of (b, s, h) between layer pairs."""
        ...

    def noise_key(self, key: DropoutKey) -> DropoutKey:
        """The dropout key of the rank's part of (b, s, h)."""
        ...
