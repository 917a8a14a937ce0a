"""One transformer block, pre-norm: x + attention(norm(x)), then x + MLP(norm(x))."""

from torch import Tensor, nn

from shoal.axes.context.run import ContextAttention, View
from shoal.kernels.dropout import Noise, dropped
from shoal.model.attention import Attention
from shoal.model.layers import Layers
from shoal.model.mlp import mlp
from shoal.model.rope import Rotation
from shoal.spec.model import ModelSpec


class Block(nn.Module):
    """x (b, s, h) -> (b, s, h), or this rank's part of it.

    turn: the rotation of this forward, None without rope; seen: from `visible`, or a ContextAttention's view; noise: keys
    of the block's two dropout sites, rows (2, b, s), or None.
    """

    def __init__(self, spec: ModelSpec, layers: Layers, crossing: ContextAttention | None = None):
        super().__init__()
        self.dropout = spec.dropout
        self.attention_norm = layers.norm()
        self.attention = Attention(spec, layers, crossing)
        self.mlp_norm = layers.norm()
        self.mlp = mlp(spec, layers)

    def forward(self, x: Tensor, turn: Rotation | None, seen: Tensor | View | None, noise: Noise | None) -> Tensor:
        y = self.attention(self.attention_norm(x), turn, seen)
        x = x + (y if noise is None else dropped(y, self.dropout, noise[0][0], noise[1]))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if noise is None else dropped(y, self.dropout, noise[0][1], noise[1]))
