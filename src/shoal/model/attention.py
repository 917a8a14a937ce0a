"""Causal attention: softmax(Q K^T / sqrt(d)) V over the keys that a query may see."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.axes.context.run import ContextAttention, View
from shoal.axes.recompute.run import Cheap, remade
from shoal.axes.tensor.memory import LEAST_BAND
from shoal.kernels.norm import RMSNorm
from shoal.model.layers import Layers
from shoal.model.rope import Rotation, rotated
from shoal.spec.model import ModelSpec


def visible(sequence: int, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor | None:
    """Which key (last dim) each query sees: bool (1 or b, 1, s, s); None when that is every key up to its own.

    A token sees itself, at most window - 1 tokens before it, and only tokens of its own document (documents (b, s)).
    """
    if window is not None and window >= sequence:
        window = None
    if window is None and documents is None:
        return None
    place = torch.arange(sequence, device=device)
    back = place[:, None] - place[None, :]  # how far the key lies before the query
    seen = (back >= 0)[None, None]
    if window is not None:
        seen = seen & (back < window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """q (b, s, a, d), k and v (b, s, g, d) -> (b, s, a, d); each group of a / g query heads shares one KV head.

    mask: what `visible` returned for the same window. A window much shorter than the sequence is computed band by
    band, so that work grows with s * window and not with s^2.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    if grouped:
        # Fused kernels of GPUs take either a mask or grouped heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    sequence, band = q.shape[2], max(window or 0, LEAST_BAND)
    if window is None or sequence <= 2 * band:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    bands = []
    for start in range(0, sequence, band):
        queries, keys = slice(start, start + band), slice(max(0, start - window + 1), start + band)
        bands.append(
            F.scaled_dot_product_attention(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=mask[:, :, queries, keys]
            )
        )
    return torch.cat(bands, dim=2).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with grouped KV heads (Ainslie et al. 2023), each rank over its own heads; x (b, s, h) -> (b, s, h).

    crossing: attends across context ranks, of which each has a part of the sequence; None: the sequence is whole here.
    selective: whether queries and keys, where they have norms, are normed and turned again in backward.
    """

    def __init__(
        self, spec: ModelSpec, layers: Layers, crossing: ContextAttention | None = None, selective: bool = False
    ):
        super().__init__()
        self.selective = selective
        self.crossing = crossing
        self.heads, self.kv_heads, self.head_size = layers.heads, layers.kv_heads, spec.head_size
        self.window = spec.window
        self.qkv = layers.column((self.heads + 2 * self.kv_heads) * self.head_size, bias=spec.qkv_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_size, eps=spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_size, eps=spec.norm_eps)
        self.qk_norm = spec.qk_norm
        self.out = layers.row(self.heads * self.head_size, bias=spec.output_bias)

    def forward(self, x: Tensor, turn: Rotation | None, seen: Tensor | View | None) -> Tensor:
        q, k, v = (
            self.qkv(x)
            .unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_size))
            .split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        )
        if turn is not None and not self.qk_norm:
            v = v.contiguous()  # else queries and keys as they were stay in memory with it, which nothing else needs

        def attended(q: Tensor, k: Tensor) -> Tensor:
            if self.crossing is None:
                assert not isinstance(seen, View)
                return attend(q, k, v, seen, self.window)
            assert isinstance(seen, View)
            return self.crossing(q, k, v, seen)

        q_norm, k_norm = (self.q_norm, self.k_norm) if self.qk_norm else (None, None)
        placed_q = Cheap(partial(_placed, norm=q_norm, turn=turn), (q,))
        placed_k = Cheap(partial(_placed, norm=k_norm, turn=turn), (k,))
        # Only norms over heads need the projection in backward, so only there it is kept anyway. Under a mask attention works
        # on copies and slices of queries and keys.
        wanted = self.selective and self.qk_norm and not isinstance(seen, Tensor)
        y = remade(attended, placed_q, placed_k, wanted=wanted)
        return self.out(y.flatten(2))


def _placed(x: Tensor, norm: nn.Module | None, turn: Rotation | None) -> Tensor:
    """Queries or keys as attention takes them."""
    x = x if norm is None else norm(x)
    return x if turn is None else rotated(x, turn)
