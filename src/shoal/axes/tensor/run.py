"""One-dimensional tensor and sequence parallelism running: a decoder's layers, each rank with its piece of them.

Shoeybi et al. 2019 cut a column layer by outputs and the row layer after it by inputs, so a pair needs one sum of
activations forward and one backward; Korthikanti et al. 2022 split each sum into a reduce-scatter and an all-gather, and
keep what lies between pairs cut along the sequence. In a group of one all of this is the plain layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.axes.piece import Piece
from shoal.axes.tensor.cut import piece
from shoal.axes.tensor.loss import head_loss
from shoal.comm import collectives, conjugate
from shoal.comm.ledger import Ledger
from shoal.comm.world import Group
from shoal.kernels.dropout import DropoutKey
from shoal.kernels.linear import Linear, PutOff, input_gradient, linear, put_off_weight, weight_gradient
from shoal.kernels.norm import norm
from shoal.spec.inventory import Parameter
from shoal.spec.model import ModelSpec

SEQUENCE = 1  # the dim of (b, s, h) that sequence parallelism cuts


class ColumnLinear(nn.Linear):
    """Y_i = X W_i: the weight is cut along its outputs, every rank computes its own columns of Y.

    X (b, s, in), or (b, s / t, in) when the `sequence` is cut -> (b, s, outputs of this rank). regather: with a cut
    sequence, keep only this rank's part of X for backward, which then gathers it a second time.
    """

    put_off: PutOff | None = None

    def __init__(
        self, inputs: int, outputs: int, bias: bool, group: Group, sequence: bool = False, regather: bool = False
    ):
        super().__init__(inputs, outputs, bias)
        self.group, self.sequence, self.regather = group, sequence, regather

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return Linear.forward(self, x)  # type: ignore[arg-type]
        return _column(x, self)


class RowLinear(nn.Linear):
    """Y = sum over ranks of X_i W_i: the weight is cut along its inputs, X arrives cut along its last dim.

    X (b, s, inputs of this rank) -> (b, s, out), or (b, s / t, out) when the `sequence` is cut. The bias, whole on
    every rank, is added once, after the sum.
    """

    put_off: PutOff | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool, group: Group, sequence: bool = False):
        super().__init__(inputs, outputs, bias)
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return Linear.forward(self, x)  # type: ignore[arg-type]
        return _row(x, self)


class VocabularyEmbedding(nn.Module):
    """tokens and positions int64 (b or 1, s) -> (b, s, h), or (b, s / t, h): each rank looks up the ids it keeps.

    weight: (rows, h), the ids from `first` on. positions: (places, h), whole, or None.
    """

    def __init__(self, rows: int, first: int, hidden: int, places: int | None, group: Group, sequence: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.positions = nn.Parameter(torch.empty(places, hidden)) if places else None
        self.first, self.group, self.sequence = first, group, sequence

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = leave(look_up(tokens, self.weight, self.first, self.group), self.group, self.sequence)
        if self.positions is None:
            return x
        if self.sequence:
            positions = own_part(positions.expand(len(tokens), -1), self.group)
        return x + nn.functional.embedding(positions, self.positions)


def look_up(tokens: Tensor, weight: Tensor, first: int, group: Group) -> Tensor:
    """Rows of the whole table whose ids this rank keeps, [first, first + len(weight)); zeros for the other ids."""
    if group.size == 1:
        return nn.functional.embedding(tokens, weight)
    places = tokens - first
    others = (places < 0) | (places >= len(weight))
    return nn.functional.embedding(places.masked_fill(others, 0), weight).masked_fill(others[..., None], 0)


class VocabularyHead(nn.Module):
    """The last norm and the product with the vocabulary's vectors, of which each rank keeps `real` from `first` on.

    A tied model passes its embedding's weight in as `tied`; `rows` (0 for a tied model) is the length of an own weight.
    """

    def __init__(self, spec: ModelSpec, rows: int, first: int, real: int, group: Group, sequence: bool):
        super().__init__()
        self.norm = norm(spec)
        self.weight = nn.Parameter(torch.empty(rows, spec.hidden)) if rows else None
        self.vocab, self.first, self.real = spec.vocab, first, real
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """x (..., h) -> logits (..., V); with targets (...) the sum of their cross-entropies, logits never whole."""
        weight = self.weight if tied is None else tied
        assert weight is not None
        x = enter(self.norm(x), self.group, self.sequence)
        if targets is not None:
            return head_loss(x, weight, targets, self.group, self.first, self.real)
        logits = conjugate.all_gather_split(linear(x, weight), self.group, dim=-1)
        return logits if self.group.size == 1 else logits[..., : self.vocab]


def enter(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """Before layers that each rank computes a part of: x whole on every rank (spec TP-3's f, SP-2)."""
    if sequence:
        return conjugate.all_gather_reduce_scatter(x, group, SEQUENCE)
    return conjugate.identity_all_reduce(x, group)


def leave(x: Tensor, group: Group, sequence: bool) -> Tensor:
    """After layers that each rank computed a part of: the sum, whole or cut along the sequence (TP-3's g, SP-2)."""
    if sequence:
        return conjugate.reduce_scatter_all_gather(x, group, SEQUENCE)
    return conjugate.all_reduce_identity(x, group)


def own_part(x: Tensor, group: Group) -> Tensor:
    """This rank's part of x (b, s, ...) along the sequence, for tensors without a gradient."""
    length = x.shape[SEQUENCE] // group.size
    return x.narrow(SEQUENCE, group.index * length, length)


class TensorLayers:
    """The layers of a decoder over the tensor axis: what `model/` builds its blocks from.

    group: the ranks of "tp". sequence: whether what lies between layer pairs is cut along the sequence (`sp`).
    heads, kv_heads: of this rank.
    """

    norm_is_local = True

    def __init__(self, spec: ModelSpec, group: Group, sequence: bool = False, regather: bool = False):
        self.spec, self.group, self.sequence, self.regather = spec, group, sequence and group.size > 1, regather
        self.heads = spec.heads // group.size
        self.kv_heads = max(1, spec.kv_heads // group.size)
        self.ffn = -(-spec.ffn // group.size)
        self._rows = -(-spec.vocab // group.size)
        self._first = min(group.index * self._rows, spec.vocab)

    def embedding(self) -> nn.Module:
        spec = self.spec
        places = spec.positions_max if spec.positions == "learned" else None
        return VocabularyEmbedding(self._rows, self._first, spec.hidden, places, self.group, self.sequence)

    def norm(self) -> nn.Module:
        """The norm over hidden."""
        return norm(self.spec)

    def column(self, outputs: int, bias: bool) -> nn.Module:
        """From hidden to `outputs` features of this rank."""
        return ColumnLinear(self.spec.hidden, outputs, bias, self.group, self.sequence, self.regather)

    def row(self, inputs: int, bias: bool) -> nn.Module:
        """From `inputs` features of this rank to hidden."""
        return RowLinear(inputs, self.spec.hidden, bias, self.group, self.sequence)

    def head(self) -> nn.Module:
        real = min(self._rows, self.spec.vocab - self._first)
        rows = 0 if self.spec.tied else self._rows
        return VocabularyHead(self.spec, rows, self._first, real, self.group, self.sequence)

    def own_samples(self, x: Tensor) -> Tensor:
        """This rank's part of x (b or 1, s) along the batch: all of it."""
        return x

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of x (b, s) as tokens lie between layer pairs: all of it, or a part of each sequence."""
        return own_part(x, self.group) if self.sequence else x

    def noise_key(self, key: DropoutKey) -> DropoutKey:
        """The dropout key of the part of (b, s, h) that lies on this rank between layer pairs."""
        if not self.sequence:
            return key
        positions = own_part(key.positions[None], self.group)[0]
        return DropoutKey(key.seed, key.step, key.samples, positions, key.first_feature)

    @property
    def width(self) -> int:
        """Features of hidden that lie on this rank."""
        return self.spec.hidden

    def residual(self, b: int, s: int) -> tuple[int, int, int]:
        """The shape of this rank's part of (b, s, h) between layer pairs."""
        return b, s // self.group.size if self.sequence else s, self.spec.hidden

    @property
    def ledger(self) -> Ledger:
        return self.group.ledger

    def pieces(self, parameters: Sequence[Parameter]) -> list[Piece]:
        """What this rank keeps of each parameter."""
        return [piece(p, self.group.size, self.group.index, self.sequence) for p in parameters]


@torch.compiler.disable
def _column(x: Tensor, layer: ColumnLinear) -> Tensor:
    return _Column.apply(x, layer.weight, layer.bias, layer)


@torch.compiler.disable
def _row(x: Tensor, layer: RowLinear) -> Tensor:
    return _Row.apply(x, layer.weight, layer.bias, layer)


class _Column(torch.autograd.Function):
    """Gathers its input if the sequence is cut; backward sums the input's gradient while it computes the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        group = layer.group
        whole = collectives.all_gather(x, group, SEQUENCE) if layer.sequence else x
        ctx.regather = layer.sequence and layer.regather
        ctx.save_for_backward(x if ctx.regather else whole, weight)
        ctx.bias, ctx.layer, ctx.place = bias, layer, group.ledger.place
        return linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: ColumnLinear = ctx.layer
        group, place = layer.group, ctx.place
        x_needs, weight_needs, bias_needs, _ = ctx.needs_input_grad
        with group.ledger.at(phase="backward", layer=place.layer, micro_batch=place.micro_batch):
            gathering = collectives.all_gather(x, group, SEQUENCE, asynchronous=True) if ctx.regather else None
            d_x = summing = None
            if x_needs:
                d_x = input_gradient(gradient, weight)
                if layer.sequence:
                    summing = collectives.reduce_scatter(d_x, group, SEQUENCE, asynchronous=True)
                else:
                    summing = collectives.all_reduce(d_x, group, asynchronous=True)
        whole = gathering.wait() if gathering is not None else x
        d_weight = d_bias = None
        if layer.put_off is not None:
            put_off_weight(layer.put_off, layer.weight, ctx.bias, gradient, whole)
        else:
            d_weight = weight_gradient(gradient, whole) if weight_needs else None
            d_bias = gradient.flatten(0, -2).sum(dim=0) if bias_needs else None
        return summing.wait() if summing is not None else None, d_weight, d_bias, None


class _Row(torch.autograd.Function):
    """Sums the ranks' products where they are, in forward; backward starts from the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.place = layer, layer.group.ledger.place
        y = linear(x, weight)
        if layer.sequence:
            y = collectives.reduce_scatter(y, layer.group, SEQUENCE)
        else:
            y = collectives.all_reduce(y, layer.group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: RowLinear = ctx.layer
        x_needs, weight_needs, bias_needs, _ = ctx.needs_input_grad
        d_bias = gradient.flatten(0, -2).sum(dim=0) if bias_needs else None
        if layer.sequence:
            place = ctx.place
            with layer.group.ledger.at(phase="backward", layer=place.layer, micro_batch=place.micro_batch):
                gradient = collectives.all_gather(gradient, layer.group, SEQUENCE)
        d_x = input_gradient(gradient, weight) if x_needs else None
        d_weight = None
        if layer.put_off is not None:
            put_off_weight(layer.put_off, layer.weight, None, gradient, x)
        elif weight_needs:
            d_weight = weight_gradient(gradient, x)
        return d_x, d_weight, d_bias, None
