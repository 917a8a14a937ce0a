"""The experts' matrix products: rows sorted by expert, each run of them with its own expert's weights.

On CUDA in 16 bit all runs are one call of torch's grouped product. Elsewhere a loop over the experts that have rows
calls shoal's linear kernels: torch's grouped product knows no float64, and on CPUs it is itself a loop over slower ones.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernels.linear import PutOff, input_gradient, linear, weight_gradient
from shoal.kernels.swiglu import swiglu_forward, swiglu_gradient

STEP = 64  # rows; oneDNN makes a kernel for each number of rows, and keeps a thousand of them, about 300 MB


class Picks(NamedTuple):
    """n picks among the rows of a tensor; a row may be picked several times, or never.

    rows (n,): the row of each pick. places (n,): the picks by row; bounds (R + 1,): those of row r are
    places[bounds[r]:bounds[r + 1]]. All int64.
    """

    rows: Tensor
    places: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, rows: Tensor, total: int) -> "Picks":
        """The picks `rows` (n,) among `total` rows."""
        bounds = F.pad(torch.bincount(rows, minlength=total).cumsum(0), (1, 0))
        return cls(rows, torch.argsort(rows, stable=True), bounds)

    def take(self, x: Tensor) -> Tensor:
        """x (R, ...) -> the picked rows (n, ...)."""
        return x.index_select(0, self.rows)

    def add_up(self, picked: Tensor, weights: Tensor | None = None) -> Tensor:
        """picked (n, h), weights (n,) -> for each row the (weighted) sum of its picks (R, h), in the order of picks."""
        return added_up(picked, self.places, self.bounds, weights)


class Entries(NamedTuple):
    """What goes through which expert: n entries, each a row for one expert, sorted by expert.

    order (n,): where each entry stood before sorting. counts (E,): entries of each expert. int64.
    """

    picks: Picks
    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rows: Tensor, experts: Tensor, total: int, number: int) -> "Entries":
        """Entries of rows (n,) among `total` for experts (n,) among `number`; within an expert they keep their order."""
        order = torch.argsort(experts, stable=True)
        picks = Picks.of(rows.index_select(0, order), total)
        return cls(picks, order, torch.bincount(experts, minlength=number))


def added_up(picked: Tensor, places: Tensor, bounds: Tensor, weights: Tensor | None = None) -> Tensor:
    """`Picks.add_up` from the two tables it needs."""
    each = None if weights is None else weights.to(picked.dtype).index_select(0, places)
    return F.embedding_bag(places, picked, bounds, mode="sum", per_sample_weights=each, include_last_offset=True)


def gather(x: Tensor, picks: Picks) -> Tensor:
    """The picked rows of x (R, h), inside autograd: (n, h)."""
    return _Gather.apply(x, picks)


def combine(picked: Tensor, picks: Picks, weights: Tensor | None = None) -> Tensor:
    """For each of R rows the sum, weighted by weights (n,), of its picks in picked (n, h), inside autograd: (R, h)."""
    return _Combine.apply(picked, weights, picks)


def grouped_mlp(
    x: Tensor,
    entries: Entries | None,
    weights: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    put_off: PutOff | None = None,
) -> Tensor:
    """For each row of x (R, h) the sum over its entries of weight * down(silu(gate(x)) * up(x)): (R, h).

    entries: None sends every row through the only expert. weights (n,), in the order of the entries, or None.
    gate_up (E, 2f, h), down (E, h, f). Kept for backward are x and gate | up of the entries; what an expert returns is
    not: the gradient of a weight is that of the hidden activations it scales, times them.
    """
    return _GroupedMLP.apply(x, weights, gate_up, down, entries, put_off)


def forward_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x (n, in), weight (E, out, in) -> (n, out)."""
    if _one_call(x, weight):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts))
    y = x.new_empty(len(x), weight.shape[1])
    for expert, rows in parts(counts):
        y[rows] = linear(x[rows], weight[expert])
    return y


def input_product(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """gradient (n, out), weight (E, out, in) -> (n, in)."""
    if _one_call(gradient, weight):
        return torch._grouped_mm(gradient, weight, offs=_ends(counts))
    y = gradient.new_empty(len(gradient), weight.shape[2])
    for expert, rows in parts(counts):
        y[rows] = input_gradient(gradient[rows], weight[expert])
    return y


def weight_product(gradient: Tensor, x: Tensor, counts: Tensor, picked: Tensor | None = None) -> Tensor:
    """gradient (n, out), x (n, in) -> each expert's sum of gradient^T x: (E, out, in), zero for one without rows.

    picked (n,): which rows of x to take, where they are to be picked first.
    """
    if picked is not None:
        x = x.index_select(0, picked)
    if _one_call(gradient, x):
        return torch._grouped_mm(gradient.t(), x, offs=_ends(counts))
    y = x.new_empty(len(counts), gradient.shape[1], x.shape[1])
    y[counts == 0] = 0
    begun = None
    for expert, rows in parts(counts):
        part = weight_gradient(gradient[rows], x[rows])
        y[expert] = y[expert] + part if expert == begun else part
        begun = expert
    return y


def parts(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, rows of it): for every expert that has any its rows up to a multiple of STEP, then the rest."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        even = start + count - count % STEP
        if even > start:
            yield expert, slice(start, even)
        start += count
        if start > even:
            yield expert, slice(even, start)


def _one_call(*operands: Tensor) -> bool:
    """Whether torch's grouped product serves these: it wants 16 bit on CUDA and rows of whole 16-byte words."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 for x in operands) and (
        operands[0].shape[0] > 0 and operands[-1].shape[-2] > 0
    )


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, picks: Picks) -> Tensor:
        ctx.save_for_backward(picks.places, picks.bounds)
        return picks.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return added_up(gradient.contiguous(), *ctx.saved_tensors), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, picked: Tensor, weights: Tensor | None, picks: Picks) -> Tensor:
        ctx.save_for_backward(picks.rows, *(() if weights is None else (picked, weights)))
        return picks.add_up(picked, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, *weighted = ctx.saved_tensors
        gradient = gradient.index_select(0, rows)
        if not weighted:
            return gradient, None, None
        picked, weights = weighted
        d_weights = _row_products(gradient, picked, weights.dtype)
        return gradient.mul_(weights[:, None]), d_weights, None


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        entries: Entries | None,
        put_off: PutOff | None,
    ) -> Tensor:
        counts = torch.tensor([len(x)], device=x.device) if entries is None else entries.counts
        both = forward_product(x if entries is None else entries.picks.take(x), gate_up, counts)
        ctx.save_for_backward(x, weights, gate_up, down, both, counts, *(() if entries is None else entries.picks))
        ctx.put_off, ctx.parameters = put_off, (gate_up, down)
        y = forward_product(_scaled(swiglu_forward(both), weights), down, counts)
        return y if entries is None else entries.picks.add_up(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, both, counts, *tables = ctx.saved_tensors
        x = x.detach()  # else what is put off would keep the graph behind it
        picks = Picks(*tables) if tables else None
        gradient = gradient.contiguous() if picks is None else picks.take(gradient)
        hidden, d_hidden = swiglu_forward(both), input_product(gradient, down, counts)
        d_weights = None if weights is None else _row_products(d_hidden, hidden, weights.dtype)
        hidden, d_hidden = _scaled(hidden, weights), _scaled(d_hidden, weights)
        d_both = swiglu_gradient(d_hidden, both)
        d_x = input_product(d_both, gate_up, counts)

        rows = () if picks is None else (picks.rows,)
        computes = (weight_product, (d_both, x, counts, *rows)), (weight_product, (gradient, hidden, counts))
        d_parameters: list[Tensor | None] = []
        for needed, parameter, (compute, inputs) in zip(
            ctx.needs_input_grad[2:4], ctx.parameters, computes, strict=True
        ):
            if needed and ctx.put_off is not None:
                ctx.put_off.add(parameter, compute, *inputs)
            d_parameters.append(compute(*inputs) if needed and ctx.put_off is None else None)
        return d_x if picks is None else picks.add_up(d_x), d_weights, *d_parameters, None, None


def _scaled(x: Tensor, weights: Tensor | None) -> Tensor:
    """x (n, f), which nobody else needs as it is, with each row times its weight."""
    return x if weights is None else x.mul_(weights[:, None])


def _row_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The inner product of each row of a with that of b (n, f) -> (n,)."""
    return (a * b).sum(dim=-1, dtype=dtype)
