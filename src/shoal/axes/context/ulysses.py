"""From a part of the tokens with all heads to all tokens with a part of the heads, and back (spec CP-7; Jacobs et al. 2023).

Query heads are cut among the ranks. KV heads are too, or where there are fewer of them than ranks, each rank is sent the
one that its query heads need. Both ways their gradients come back by the transposed all-to-all.
"""

import torch
from torch import Tensor

from shoal.axes.context.order import kv_heads_each
from shoal.comm.conjugate import all_to_all
from shoal.comm.world import Group
from shoal.spec.fit import exchanges


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """q (b, s, a, d), k and v (b, s, g, d) -> (b, N s, a / N, d) and (b, N s, max(g / N, 1), d), in one all-to-all.

    The ranks' tokens follow one another in the order of the ranks. Heads are such that spec/fit.py lets them pass.
    """
    ranks = group.size
    if ranks == 1:
        return q, k, v  # without copies
    heads, kv_heads = q.shape[2], k.shape[2]
    assert exchanges(heads, kv_heads, ranks), "spec/fit.py refuses these"
    each = kv_heads_each(kv_heads, ranks)
    shared = max(ranks // kv_heads, 1)  # ranks that need the same KV head
    parts = [
        q.unflatten(2, (ranks, heads // ranks)),
        *(x.repeat_interleave(shared, 2).unflatten(2, (ranks, each)) for x in (k, v)),
    ]
    arrived = all_to_all(torch.cat(parts, 3).movedim(2, 0).contiguous(), group)
    q, k, v = arrived.movedim(0, 1).flatten(1, 2).split((heads // ranks, each, each), dim=2)
    return q, k, v


def to_tokens(out: Tensor, group: Group) -> Tensor:
    """(b, N s, a / N, d) -> (b, s, a, d): the way back."""
    if group.size == 1:
        return out
    pieces = out.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
    return all_to_all(pieces, group).movedim(0, 2).flatten(2, 3)
