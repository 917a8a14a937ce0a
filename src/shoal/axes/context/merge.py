"""Attention over several blocks of keys, merged by log-sum-exp: exact, in whatever order the blocks come (spec CP-2)."""

import torch
from torch import Tensor


class Merged:
    """Attention of some queries over all keys that were added so far.

    For each row and head, with scores S of the keys: lse = log sum exp S, and out = sum exp(S - lse) V. A row that has
    seen nothing has out 0 and lse -inf. Both are accumulated in float32 at least.
    """

    def __init__(self, q: Tensor):
        """q: (b, s, a, d), for its shape, dtype and device."""
        self._like, self._accurate = q, torch.promote_types(q.dtype, torch.float32)
        self._sums: tuple[Tensor, Tensor] | None = None  # nothing was added yet

    def add(self, out: Tensor, lse: Tensor, samples: slice = slice(None), rows: slice = slice(None)) -> None:
        """Adds the attention over some more keys: out (b, s, a, d) and lse (b, s, a) of these samples and rows.

        lse' = log(exp lse + exp lse_new), and both outs weigh exp(their lse - lse'). The tensors may be kept.
        """
        if self._sums is None and out.shape == self._like.shape:
            self._sums = out.to(self._accurate), lse.to(self._accurate)
            return
        all_out, all_lse = self.result()
        mine, total = all_out[samples, rows], all_lse[samples, rows]
        both = torch.logaddexp(total, lse)
        base = both.masked_fill(both == -torch.inf, 0.0)  # -inf - -inf is no number
        mine.mul_((total - base).exp_()[..., None]).add_(out * (lse - base).exp_()[..., None])
        total.copy_(both)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of all that was added; they change when more is."""
        if self._sums is None:
            out = self._like.new_zeros(self._like.shape, dtype=self._accurate)
            self._sums = out, self._like.new_full(out.shape[:3], -torch.inf, dtype=self._accurate)
        return self._sums
