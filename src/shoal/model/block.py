"""One transformer block, pre-norm: x + attention(norm(x)), then x + MLP(norm(x))."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.axes.context.run import ContextAttention, View
from shoal.axes.expert.run import MixtureOfExperts
from shoal.axes.recompute.cost import Mode
from shoal.axes.recompute.run import Cheap, recomputed, remade
from shoal.kernels.dropout import Noise, dropped
from shoal.model.attention import Attention
from shoal.model.layers import Layers
from shoal.model.mlp import mlp
from shoal.model.moe import Tokens, routed
from shoal.model.rope import Rotation
from shoal.spec.model import ModelSpec


class Block(nn.Module):
    """x (b, s, h) -> (b, s, h), or this rank's part of it.

    turn: the rotation of this forward, None without rope; seen: from `visible`, or a ContextAttention's view; noise: keys
    of the block's two dropout sites, rows (2, b, s), or None; routing: of the tokens, for experts. recompute: what backward
    computes again. mixture: the experts that take the MLP's place, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Layers,
        crossing: ContextAttention | None = None,
        recompute: Mode = "none",
        mixture: MixtureOfExperts | None = None,
    ):
        super().__init__()
        self.dropout = spec.dropout
        self.recompute, self.ledger = recompute, layers.ledger
        selective = recompute == "selective"
        self.remakes_norms = selective and layers.norm_is_local
        self.attention_norm = layers.norm()
        self.attention = Attention(spec, layers, crossing, selective)
        self.mlp_norm = layers.norm()
        self.mlp = mlp(spec, layers, selective) if mixture is None else mixture
        self._inside: Callable[..., Tensor] = self._computed

    def forward(
        self,
        x: Tensor,
        turn: Rotation | None,
        seen: Tensor | View | None,
        noise: Noise | None,
        routing: Tokens | None = None,
    ) -> Tensor:
        if self.recompute == "full":
            # Everything that attention sends to context ranks is sent again, like all else.
            inside = partial(self._inside, turn=turn, seen=seen, noise=noise, routing=routing)
            return recomputed(inside, x, self.ledger)
        return self._computed(x, turn, seen, noise, routing)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As nn.Module's; of a block that is computed again what is inside, which so is compiled both times."""
        if self.recompute == "full":
            self._inside = torch.compile(self._computed, *args, **kwargs)
        else:
            super().compile(*args, **kwargs)

    def _computed(
        self,
        x: Tensor,
        turn: Rotation | None,
        seen: Tensor | View | None,
        noise: Noise | None,
        routing: Tokens | None,
    ) -> Tensor:
        attention = partial(self.attention, turn=turn, seen=seen)
        y = remade(attention, Cheap(self.attention_norm, (x,)), wanted=self.remakes_norms)
        x = x + (y if noise is None else dropped(y, self.dropout, noise[0][0], noise[1]))
        feed_forward: Callable[..., Tensor] = self.mlp
        if isinstance(self.mlp, MixtureOfExperts):
            assert routing is not None, "experts must know which tokens count"
            feed_forward = partial(routed, mixture=self.mlp, tokens=routing)
        y = remade(feed_forward, Cheap(self.mlp_norm, (x,)), wanted=self.remakes_norms)
        return x + (y if noise is None else dropped(y, self.dropout, noise[0][1], noise[1]))
