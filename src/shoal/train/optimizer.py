"""AdamW over flat runs of weights: one fused update per run, weight decay on matrices only, states where there is room."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shoal.axes.flat import Held
from shoal.axes.piece import Span
from shoal.comm.ledger import Ledger
from shoal.spec.job import TrainSpec
from shoal.train.files import room_in

Run = tuple[Tensor, Tensor, bool]  # weights, gradients, whether weight decay applies


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) through torch's fused kernel, on this rank's runs.

    float32 and float64 weights are updated in place. bfloat16 weights follow float32 master weights that live here,
    since a bfloat16 weight loses updates below 1/256 of itself; the moments are float32 too (spec MEM-1: 12 bytes).

    train.offload: "host" keeps masters and moments in the host's memory, "disk" in memory-mapped files below `folder`;
    each run's come to the device for its update and go back, which the ledger counts under that name (spec BG-6).
    """

    def __init__(self, runs: Iterable[Run], train: TrainSpec, ledger: Ledger, folder: Path | None = None):
        self.runs, self.train, self.ledger = list(runs), train, ledger
        self.steps = torch.zeros(())
        self.states: list[dict[str, Tensor]] = []
        for number, (weights, _, _) in enumerate(self.runs):
            accurate = torch.promote_types(weights.dtype, torch.float32)
            fresh = {
                "moment1": torch.zeros_like(weights, dtype=accurate),
                "moment2": torch.zeros_like(weights, dtype=accurate),
            }
            if weights.dtype != accurate:
                fresh["master"] = weights.to(accurate)
            self.states.append({name: self._put(state, folder, f"{number}.{name}") for name, state in fresh.items()})

    def step(self, learning_rate: float) -> None:
        """One update with the gradients as they stand in the runs."""
        self.steps += 1
        for (weights, gradients, decays), kept in zip(self.runs, self.states, strict=True):
            states = self._fetch(kept, weights.device)
            master = states.get("master", weights)
            adamw(
                [master],
                [gradients.to(master.dtype)],
                [states["moment1"]],
                [states["moment2"]],
                [],
                [self.steps.to(weights.device) - 1],  # the kernel counts this step itself
                fused=True,
                amsgrad=False,
                beta1=self.train.beta1,
                beta2=self.train.beta2,
                lr=learning_rate,
                weight_decay=self.train.weight_decay if decays else 0.0,
                eps=self.train.eps,
                maximize=False,
            )
            if master is not weights:
                weights.copy_(master)
            self._store(states, kept)

    @property
    def updates(self) -> int:
        """How many updates were made, those of a run that this one continues included."""
        return int(self.steps)

    def kept(self) -> Iterator[dict[str, Tensor]]:
        """What determines each run, in place: its weights in float32 at least, and its moments."""
        for (weights, _, _), states in zip(self.runs, self.states, strict=True):
            yield {"weight": states.get("master", weights), **{name: states[name] for name in ("moment1", "moment2")}}

    def restored(self, updates: int) -> None:
        """Goes on after `updates` updates with what was written into `kept`."""
        self.steps.fill_(updates)
        for (weights, _, _), states in zip(self.runs, self.states, strict=True):
            if "master" in states:
                weights.copy_(states["master"])

    def state_bytes(self) -> int:
        """Bytes of master weights and moments that this rank keeps, wherever they are."""
        return sum(_bytes(state) for states in self.states for state in states.values())

    def _put(self, state: Tensor, folder: Path | None, name: str) -> Tensor:
        """A state in the place where it is kept between steps."""
        if self.train.offload == "none":
            return state
        if self.train.offload == "host":
            return state.cpu().pin_memory() if state.is_cuda else state
        assert folder is not None, "states on disk need a folder"
        with room_in(folder.parent.parent):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _bytes(state))  # a full disk is found here, not by a signal later
        kept = torch.from_file(str(folder / name), shared=True, size=state.numel(), dtype=state.dtype)
        return kept.copy_(state)

    def _fetch(self, kept: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        if self.train.offload == "none":
            return kept
        self.ledger.record(self.train.offload, "fetch", 0, sum(map(_bytes, kept.values())))
        return {name: state.to(device, copy=True) for name, state in kept.items()}

    def _store(self, states: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
        if self.train.offload == "none":
            return
        self.ledger.record(self.train.offload, "store", sum(map(_bytes, kept.values())), 0)
        for name, state in states.items():
            kept[name].copy_(state)


def located(held: Iterable[Held], runs: Iterable[dict[str, Tensor]]) -> Iterator[tuple[Span, dict[str, Tensor]]]:
    """What lies where in the optimizer's runs: each parameter's span, relative to the run's start, and the run's states.

    held: the buffers of the states; runs: states by name, "weight" among them, in the order of AdamW.runs. The runs of a
    buffer follow each other from its start, and a parameter is in one of them.
    """
    following = iter(runs)
    for _, spans in held:
        run: dict[str, Tensor] = {}
        start = stop = 0
        for span in spans:
            while span.stop > stop:
                run = next(following)
                start, stop = stop, stop + len(run["weight"])
            yield span._replace(start=span.start - start, stop=span.stop - start), run


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
