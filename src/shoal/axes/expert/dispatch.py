"""Tokens travel to the ranks that hold their experts, and back (spec EP-3): all-to-alls with exact lengths.

Rank r of N holds experts r E / N to (r + 1) E / N - 1. Forward is two all-to-alls of rows, there and back, and backward
mirrors it, so that gradients of routing weights arise where the token came from. Lengths may be zero.
"""

import torch
from torch import Tensor

from shoal.axes.expert.grouped import Entries, Picks, combine, gather, grouped_mlp
from shoal.comm import collectives, conjugate
from shoal.comm.world import Group
from shoal.kernels.linear import PutOff


def routed_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group: Group,
    duplicate_free: bool = False,
    put_off: PutOff | None = None,
) -> Tensor:
    """For each token the sum of weight * expert(x) over its experts: x (T, h) -> (T, h).

    experts (T, k) int64, negative where dropped, and weights (T, k). gate_up (E / N, 2f, h), down (E / N, h, f): of the
    experts of this rank of `group`. duplicate_free: a token goes to a rank once, though several of its experts are
    there, its weights go with it, and one sum comes back.
    """
    entries = _entries(experts, len(gate_up) * group.size)
    scale = weights.flatten()[entries.order]
    if group.size == 1:  # every token is where its experts are
        return grouped_mlp(x, entries, scale, gate_up, down, put_off)
    if duplicate_free:
        return _once_per_rank(x, entries, scale, gate_up, down, group, put_off)
    return _once_per_expert(x, entries, scale, gate_up, down, group, put_off)


def _entries(experts: Tensor, number: int) -> Entries:
    """The choices that were not dropped, sorted by expert; `order` counts in the flat table (T k)."""
    tokens, k = experts.shape
    flat = experts.flatten()
    kept = torch.nonzero(flat >= 0).squeeze(1)
    entries = Entries.of(kept // k, flat[kept], tokens, number)
    return entries._replace(order=kept[entries.order])


def _once_per_expert(
    x: Tensor, entries: Entries, scale: Tensor, gate_up: Tensor, down: Tensor, group: Group, put_off: PutOff | None
) -> Tensor:
    """A row for every choice; what comes back is weighted and summed here."""
    leaving = entries.counts.view(group.size, -1)
    arriving = collectives.all_to_all(leaving, group)
    send_sizes, receive_sizes = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    rows = conjugate.all_to_all(gather(x, entries.picks), group, send_sizes, receive_sizes)
    all_rows = torch.arange(len(rows), device=rows.device)
    here = Entries.of(all_rows, _experts_of_arrivals(arriving), len(rows), arriving.shape[1])
    rows = grouped_mlp(rows, here, None, gate_up, down, put_off)
    rows = conjugate.all_to_all(rows, group, receive_sizes, send_sizes)
    return combine(rows, entries.picks, scale)


def _once_per_rank(
    x: Tensor, entries: Entries, scale: Tensor, gate_up: Tensor, down: Tensor, group: Group, put_off: PutOff | None
) -> Tensor:
    """A row for every pair of token and rank; with it, for each of its experts there, the weight and the row's place.

    Counts first: for each peer the choices of each of its experts, and the rows.
    """
    token, ranks = entries.picks.rows, group.size
    counts = entries.counts.view(ranks, -1)
    to = torch.arange(ranks, device=x.device).repeat_interleave(counts.sum(1))
    pairs, row = torch.unique(to * len(x) + token, return_inverse=True)  # sorted: by rank, then by token
    rows = torch.bincount(pairs // max(1, len(x)), minlength=ranks)
    leaving = torch.cat([counts, rows[:, None]], dim=1)
    arriving = collectives.all_to_all(leaving, group)
    send_choices, receive_choices = counts.sum(1).tolist(), arriving[:, :-1].sum(1).tolist()
    send_rows, receive_rows = rows.tolist(), arriving[:, -1].tolist()

    first = (rows.cumsum(0) - rows)[to]
    place = collectives.all_to_all((row - first).to(torch.int32), group, send_choices, receive_choices)
    there = conjugate.all_to_all(scale, group, send_choices, receive_choices)
    picks = Picks.of(pairs % max(1, len(x)), len(x))
    x = conjugate.all_to_all(gather(x, picks), group, send_rows, receive_rows)

    starts = arriving[:, -1].cumsum(0) - arriving[:, -1]
    origin = starts.repeat_interleave(arriving[:, :-1].sum(1))
    here = Entries.of(place + origin, _experts_of_arrivals(arriving[:, :-1]), len(x), arriving.shape[1] - 1)
    sums = grouped_mlp(x, here, there[here.order], gate_up, down, put_off)
    return combine(conjugate.all_to_all(sums, group, receive_rows, send_rows), picks)


def _experts_of_arrivals(counts: Tensor) -> Tensor:
    """The local expert of each arrival, which come by source and then by expert. counts: (N, E / N)."""
    ranks, experts = counts.shape
    return torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
