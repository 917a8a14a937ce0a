"""AdamW over flat runs of weights: one fused update per contiguous run, with weight decay on matrices only."""

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.spec.job import TrainSpec


class AdamW:
    """torch's fused AdamW (Loshchilov and Hutter 2019) on runs: (weights, gradients, whether weight decay applies).

    float32 and float64 weights are updated in place. bfloat16 weights follow float32 master weights that live here,
    since a bfloat16 weight loses updates below 1/256 of itself; the moments are float32 too (spec MEM-1: 12 bytes).
    """

    def __init__(self, runs: Iterable[tuple[Tensor, Tensor, bool]], train: TrainSpec):
        runs = list(runs)
        self.weights = [weights for weights, _, _ in runs]
        self.gradients = [gradients for _, gradients, _ in runs]
        self.mixed = self.weights[0].dtype == torch.bfloat16
        self.masters = [weights.float() if self.mixed else weights for weights in self.weights]
        decays = [decays for *_, decays in runs]
        groups = [
            {
                "params": [master for master, decay in zip(self.masters, decays, strict=True) if decay == wanted],
                "weight_decay": train.weight_decay if wanted else 0.0,
            }
            for wanted in (True, False)
        ]
        self.fused = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )

    def step(self, learning_rate: float) -> None:
        """One update with the gradients as they stand in the runs."""
        for group in self.fused.param_groups:
            group["lr"] = learning_rate
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient.float() if self.mixed else gradient
        self.fused.step()
        for master in self.masters:
            master.grad = None
        if self.mixed:
            torch._foreach_copy_(self.weights, self.masters)

    def state_bytes(self) -> int:
        """Bytes of master weights and moments held on this rank, the step counters left out."""
        moments = sum(
            value.numel() * value.element_size()
            for state in self.fused.state.values()
            for name, value in state.items()
            if name != "step"
        )
        masters = sum(master.numel() * master.element_size() for master in self.masters) if self.mixed else 0
        return moments + masters
