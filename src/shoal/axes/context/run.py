"""Context parallelism running: attention in which every rank has a share of the tokens, by any kind, under any mask.

Only attention crosses context ranks; everything else works on the tokens that a rank has. Every rank's weight gradients
are parts of a sum over the context ranks, as over data ranks (spec CP-1).
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.axes.context import kernel, order
from shoal.axes.context.gather import Gather
from shoal.axes.context.mask import hidden
from shoal.axes.context.merge import Merged
from shoal.axes.context.ring import Ring
from shoal.axes.context.tiles import Sight, Tile
from shoal.axes.context.ulysses import to_heads, to_tokens
from shoal.comm.world import Group

Array = TypeVar("Array", np.ndarray, Tensor)


class View:
    """What a rank's queries see of each rank's keys: made once for a micro-batch, used by all its layers.

    steps: of the ring, until nobody has anything left to compute.
    """

    def __init__(self, sight: Sight, kind: str, ranks: int, rank: int):
        self.steps = order.steps(kind, sight.sequence, ranks, sight.causal, sight.window)
        self._sight, self._rank = sight, rank
        self._shares = [order.places(kind, sight.sequence, ranks, owner) for owner in range(ranks)]
        self._tiles: dict[int, list[Tile]] = {}

    def tiles(self, owner: int) -> list[Tile]:
        """Tiles of this rank's queries and the keys of rank `owner`."""
        if owner not in self._tiles:
            self._tiles[owner] = self._sight.tiles(self._shares[self._rank], self._shares[owner])
        return self._tiles[owner]


class ContextAttention:
    """Attention over the context ranks of `group`, by kind: ring, zigzag, striped, allgather, ulysses or hybrid.

    ring, ulysses: the two groups of a hybrid; `ulysses` are consecutive ranks of `group`, `ring` every so many-th.
    accumulate: dtype in which gradients of keys and values are summed and sent; by default float32 at least. In a group
    of one this is attention on one process.
    """

    def __init__(
        self,
        kind: str,
        group: Group,
        ring: Group | None = None,
        ulysses: Group | None = None,
        accumulate: torch.dtype | None = None,
    ):
        self.kind, self.group, self.accumulate = kind, group, accumulate
        if kind == "hybrid":
            assert ring is not None and ulysses is not None, "a hybrid has two groups"
            assert group.size == ring.size * ulysses.size and group.index == ring.index * ulysses.size + ulysses.index
            self._ring, self._across, self._ring_kind = ring, ulysses, "zigzag"
        elif kind == "ulysses":
            self._ring, self._across, self._ring_kind = group.alone(), group, "ring"
        else:
            self._ring, self._across, self._ring_kind = group, group.alone(), kind

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, view: View, scale: float | None = None) -> Tensor:
        """q (b, s, a, d), k and v (b, s, g, d) of this rank's tokens -> (b, s, a, d); scale: by default 1 / sqrt(d).

        Positions are in q and k already; `view` tells what is seen.
        """
        carrier = Gather(self._ring) if self.kind == "allgather" else Ring(self._ring, view.steps)
        q, k, v = to_heads(q, k, v, self._across)
        accumulate = self.accumulate or torch.promote_types(k.dtype, torch.float32)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = _Blockwise.apply(q, k, v, view, carrier, scale, accumulate)
        return to_tokens(out, self._across)

    def view(
        self,
        sequence: int,
        causal: bool = True,
        window: int | None = None,
        documents: np.ndarray | Tensor | None = None,
    ) -> View:
        """What this rank sees of a whole sequence of so many tokens; documents (b, sequence), alike on all its ranks.

        A token sees itself and window - 1 tokens before it (and, without `causal`, after it), of its own document.
        """
        if isinstance(documents, Tensor):
            documents = documents.cpu().numpy()
        sight = Sight(sequence, causal, window, documents)
        return View(sight, self._ring_kind, self._ring.size, self._ring.index)

    def places(self, sequence: int) -> np.ndarray:
        """This rank's tokens' places in the whole sequence, ascending: their position ids."""
        return order.places(self.kind, sequence, self.group.size, self.group.index, self._across.size)

    def share(self, x: Array, dim: int) -> Array:
        """This rank's tokens of an array of the whole sequence, which runs along `dim`."""
        return _taken(x, self.places(x.shape[dim]), dim)

    def whole(self, shares: Sequence[Array], dim: int) -> Array:
        """The array of the whole sequence from all ranks' shares of it."""
        together = np.concatenate(shares, dim) if isinstance(shares[0], np.ndarray) else torch.cat(list(shares), dim)
        back = order.inverse(self.kind, together.shape[dim], self.group.size, self._across.size)
        return _taken(together, back, dim)


class _Blockwise(torch.autograd.Function):
    """Attention over blocks of keys that a carrier brings by; backward has it bring them again.

    Saved: this rank's own q, k, v, out and log-sum-exp, and nothing of the other ranks'.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        view: View,
        carrier: Ring | Gather,
        scale: float,
        accumulate: torch.dtype,
    ) -> Tensor:
        merged = Merged(q)

        def attend(owner: int, k: Tensor, v: Tensor) -> None:
            for tile in view.tiles(owner):
                queries, keys = (tile.samples, tile.queries), (tile.samples, tile.keys)
                out, lse = kernel.forward(q[queries], k[keys], v[keys], _seen(tile, q), scale)
                merged.add(out, lse, *queries)

        carrier.forward(k, v, attend)
        out, lse = merged.result()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.view, ctx.carrier, ctx.scale, ctx.accumulate = view, carrier, scale, accumulate
        ctx.place = carrier.group.ledger.place
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def collect(owner: int, k: Tensor, v: Tensor, into: Tensor) -> None:
            for tile in ctx.view.tiles(owner):
                queries, keys = (tile.samples, tile.queries), (tile.samples, tile.keys)
                of_row = gradient[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]
                dq_tile, dk, dv = kernel.backward(*of_row, _seen(tile, q), ctx.scale)
                dq[queries] += dq_tile
                into[0][keys] += dk
                into[1][keys] += dv

        place = ctx.place
        with ctx.carrier.group.ledger.at(phase="backward", layer=place.layer, micro_batch=place.micro_batch):
            dk, dv = ctx.carrier.backward(k, v, collect, ctx.accumulate).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def _seen(tile: Tile, q: Tensor) -> kernel.Seen:
    return hidden(tile, q.device) if tile.seen == "some" else tile.seen


def _taken(x: Array, index: np.ndarray, dim: int) -> Array:
    if isinstance(x, np.ndarray):
        return np.take(x, index, dim)
    return x.index_select(dim, torch.from_numpy(index).to(x.device))
