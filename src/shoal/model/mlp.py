"""The two feed-forward kinds: SwiGLU (Shazeer 2020) and GELU in its tanh approximation (Hendrycks & Gimpel 2016)."""

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.axes.recompute.run import Cheap, remade
from shoal.kernels.swiglu import swiglu
from shoal.model.layers import Layers
from shoal.spec.model import ModelSpec


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); x (b, s, h) -> (b, s, h). selective: backward makes the product again."""

    def __init__(self, spec: ModelSpec, layers: Layers, selective: bool = False):
        super().__init__()
        self.selective = selective
        self.gate_up = layers.column(2 * layers.ffn, bias=spec.mlp_bias)
        self.down = layers.row(layers.ffn, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return remade(self.down, Cheap(swiglu, (self.gate_up(x),)), wanted=self.selective)


class GeluMLP(nn.Module):
    """down(gelu(up(x))); x (b, s, h) -> (b, s, h). selective: backward makes gelu's result again."""

    def __init__(self, spec: ModelSpec, layers: Layers, selective: bool = False):
        super().__init__()
        self.selective = selective
        self.up = layers.column(layers.ffn, bias=spec.mlp_bias)
        self.down = layers.row(layers.ffn, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return remade(self.down, Cheap(gelu, (self.up(x),)), wanted=self.selective)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def mlp(spec: ModelSpec, layers: Layers, selective: bool = False) -> nn.Module:
    """The MLP that the model asks for."""
    return (GatedMLP if spec.mlp == "swiglu" else GeluMLP)(spec, layers, selective)
