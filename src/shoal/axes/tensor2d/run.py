"""Two-dimensional tensor parallelism running: a decoder's layers on a q x q grid of ranks, weights and activations cut.

Rank (i, j), number i q + j of the grid, works on block i of the micro-batch's sequences. Between layers it holds block j
of their hidden features; inside a pair of layers its own heads or its own columns of the MLP. Every rank is given the
whole micro-batch's token ids, places and targets, which are small, and takes its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.axes.piece import Piece
from shoal.axes.tensor.run import look_up
from shoal.axes.tensor2d.cut import piece
from shoal.axes.tensor2d.loss import grid_head_loss
from shoal.axes.tensor2d.norm import row_norm
from shoal.axes.tensor2d.summa import SummaLinear, blocks, summa
from shoal.comm.collectives import reduce
from shoal.comm.conjugate import all_gather_split
from shoal.comm.exchange import exchange
from shoal.comm.ledger import Ledger
from shoal.comm.world import Group
from shoal.kernels.dropout import DropoutKey
from shoal.spec.inventory import Parameter
from shoal.spec.model import ModelSpec


class Tensor2DLayers:
    """The layers of a decoder on a tensor grid: what `model/` builds its blocks from.

    row: the ranks with the same samples; column: those with the same features; grid: all of them, row after row.
    heads, kv_heads, ffn: of this rank. The sequences of a micro-batch and hidden divide by the grid's side.
    """

    def __init__(self, spec: ModelSpec, row: Group, column: Group, grid: Group):
        side = row.size
        assert side == column.size and grid.index == column.index * side + row.index, "not a square grid, row after row"
        assert spec.hidden % side == 0, f"hidden = {spec.hidden} does not divide by {side}"
        self.spec, self.row_group, self.column_group, self.grid = spec, row, column, grid
        self.heads = spec.heads // side
        self.kv_heads = max(1, spec.kv_heads // side)
        self.ffn = -(-spec.ffn // side)
        self._rows = -(-spec.vocab // side)
        self._first = min(row.index * self._rows, spec.vocab)

    def embedding(self) -> nn.Module:
        places = self.spec.positions_max if self.spec.positions == "learned" else None
        return GridEmbedding(self._rows, self._first, self.width, places, self.row_group, self.column_group, self.grid)

    def norm(self) -> nn.Module:
        """The norm over hidden."""
        return row_norm(self.spec, self.row_group)

    def column(self, outputs: int, bias: bool) -> nn.Module:
        """From hidden to `outputs` features of this rank."""
        return SummaLinear(self.width, outputs, bias, self.row_group, self.column_group)

    def row(self, inputs: int, bias: bool) -> nn.Module:
        """From `inputs` features of this rank to hidden."""
        return SummaLinear(inputs, self.width, bias, self.row_group, self.column_group)

    def head(self) -> nn.Module:
        real = min(self._rows, self.spec.vocab - self._first)
        rows = 0 if self.spec.tied else self._rows
        return GridHead(self.spec, rows, self._first, real, self.row_group, self.column_group)

    def own_samples(self, x: Tensor) -> Tensor:
        """This rank's samples of x (b, ...); an x (1, ...) that stands for all samples comes back as it is."""
        return x if len(x) == 1 else own_block(x, self.column_group)

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of x (b, s) as tokens lie between layer pairs."""
        return self.own_samples(x)

    def noise_key(self, key: DropoutKey) -> DropoutKey:
        """The dropout key of this rank's block of (b, s, h)."""
        samples = own_block(key.samples, self.column_group)
        return DropoutKey(
            key.seed, key.step, samples, key.positions, key.first_feature + self.row_group.index * self.width
        )

    @property
    def width(self) -> int:
        """Features of hidden that lie on this rank between layer pairs."""
        return self.spec.hidden // self.row_group.size

    def residual(self, b: int, s: int) -> tuple[int, int, int]:
        """The shape of this rank's block of (b, s, h) between layer pairs."""
        return b // self.column_group.size, s, self.width

    @property
    def norm_is_local(self) -> bool:
        """Whether this rank has all features of its tokens."""
        return self.row_group.size == 1

    @property
    def ledger(self) -> Ledger:
        return self.grid.ledger

    def pieces(self, parameters: Sequence[Parameter]) -> list[Piece]:
        """What this rank keeps of each parameter."""
        return [piece(p, self.row_group.size, self.column_group.index, self.row_group.index) for p in parameters]


class GridEmbedding(nn.Module):
    """tokens and positions int64 (b or 1, s), of the whole micro-batch -> this rank's block (b / q, s, h / q).

    weight: (ids, h / q), like the head's: the ids from `first` on, block j of all, and block i of the features.
    positions: (places, h / q), all places and block j of the features, or None.
    """

    def __init__(self, rows: int, first: int, width: int, places: int | None, row: Group, column: Group, grid: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.positions = nn.Parameter(torch.empty(places, width)) if places else None
        self.first, self.row, self.column, self.grid = first, row, column, grid

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = _look_up(tokens, self)
        if self.positions is None:
            return x
        places = positions if len(positions) == 1 else own_block(positions, self.column)
        return x + nn.functional.embedding(places, self.positions)


class GridHead(nn.Module):
    """The last norm and the product with the vocabulary's vectors, of which this rank keeps a block.

    weight: (rows, h / q), block j of the ids, `real` of them from `first` on, and block i of the features. A tied model
    passes its embedding's weight in as `tied`; `rows` (0 for a tied model) is the length of an own weight.
    """

    def __init__(self, spec: ModelSpec, rows: int, first: int, real: int, row: Group, column: Group):
        super().__init__()
        self.norm = row_norm(spec, row)
        self.weight = nn.Parameter(torch.empty(rows, spec.hidden // row.size)) if rows else None
        self.vocab, self.first, self.real = spec.vocab, first, real
        self.row, self.column = row, column

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """x (b / q, ..., h / q) -> logits (b, ..., V) on every rank, whole; with targets (b, ...) the sum of losses."""
        weight = self.weight if tied is None else tied
        assert weight is not None
        x = self.norm(x)
        if targets is not None:
            own = own_block(targets, self.column)
            return grid_head_loss(x, weight, own, self.row, self.column, self.first, self.real)
        logits = all_gather_split(summa(x, weight, None, self.row, self.column), self.row, dim=-1)
        return all_gather_split(logits[..., : self.vocab], self.column)


def own_block(x: Tensor, column: Group) -> Tensor:
    """This rank's block of x (b, ...) along the samples."""
    return block_of(x, column.index, column.size)


def block_of(x: Tensor, index: int, side: int) -> Tensor:
    """Block number `index` of `side` of x (b, ...) along the samples."""
    assert len(x) % side == 0, f"{len(x)} sequences do not divide among the {side} rows of a tensor grid"
    return x.narrow(0, index * (len(x) // side), len(x) // side)


@torch.compiler.disable
def _look_up(tokens: Tensor, layer: GridEmbedding) -> Tensor:
    return _LookUp.apply(layer.weight, tokens, layer)


class _LookUp(torch.autograd.Function):
    """Rank (i, j) finds features i of ids j, for one block of tokens k after the other; the row's sum goes to (i, k).

    There it is block (k, i) of the activations, which lives on (k, i): the two ranks swap. Backward swaps back and
    passes each block along the row, so the weight's gradient is complete.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, layer: GridEmbedding) -> Tensor:
        row = layer.row
        ctx.save_for_backward(tokens)
        ctx.layer, ctx.rows, ctx.place = layer, len(weight), row.ledger.place
        found = None
        for root in range(row.size):
            part = look_up(block_of(tokens, root, row.size), weight, layer.first, row)
            part = reduce(part, row, root, overwrite=True)
            if root == row.index:
                found = part
            del part
        assert found is not None
        return _swapped(found, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        layer, place, d_weight = ctx.layer, ctx.place, None
        row = layer.row
        with row.ledger.at(phase="backward", layer=place.layer, micro_batch=place.micro_batch):
            for root, block in enumerate(blocks(_swapped(gradient.contiguous(), layer), row)):
                places = block_of(tokens, root, row.size) - layer.first
                others = (places < 0) | (places >= ctx.rows)
                # as F.embedding's own backward, which is deterministic on every device
                part = torch.ops.aten.embedding_dense_backward(
                    block.masked_fill(others[..., None], 0), places.masked_fill(others, 0), ctx.rows, -1, False
                )
                d_weight = part if d_weight is None else d_weight.add_(part)
                del part
        assert d_weight is not None
        return d_weight, None, None


def _swapped(x: Tensor, layer: GridEmbedding) -> Tensor:
    """What rank (j, i) of the grid holds, for an x that rank (i, j) holds."""
    i, j = layer.column.index, layer.row.index
    if i == j:
        return x
    peer = j * layer.row.size + i
    (arrived,) = exchange([(x, peer)], [(torch.empty_like(x), peer)], layer.grid).wait()
    return arrived
