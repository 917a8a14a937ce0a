"""Compares what a layout computed with what one process computed: losses, gradients, weights, norms. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# By layer with experts: tokens (n,), numbered through all steps, and the experts that each of them chose (n, k).
Chosen = Mapping[int, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Executed:
    """The instructions of one step of a pipeline in order, and the most forwards whose activations were held at once."""

    instructions: list[str]
    alive: int


@dataclass(frozen=True)
class Record:
    """What one rank saw of a trial. gradients: per step, per parameter, summed over all tokens; of its pieces alone.

    buffers: what it keeps beside its weights, whole. sent: what its routers sent to experts, see plan/experts.py. memory,
    routed, executed: of one more step in which every target counts, the most bytes by category, what its routers sent by
    micro-batch, and what a pipeline did. before, chosen: in a type other than float64, the weights that each step began with,
    and the experts that tokens chose.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: Sequence[Mapping[str, np.ndarray]]
    weights: Mapping[str, np.ndarray]
    transfers: list
    buffers: Mapping[str, np.ndarray] = field(default_factory=dict)
    sent: Mapping = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    routed: Mapping = field(default_factory=dict)
    executed: Executed | None = None
    before: Sequence[Mapping[str, np.ndarray]] = ()
    chosen: Chosen = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """The largest relative difference of one kind and where it is."""

    value: float
    where: str


LEAST = 1e-5  # of all parameters' gradient: a smaller one is compared with this, as it may be nothing but rounding


def relative(found: np.ndarray | float, truth: np.ndarray | float, least: float = 0.0) -> float:
    """|found - truth| / |truth| in the L2 norm; |found| where the truth is zero; infinite for NaN and for other shapes.

    least: what to divide by where the truth is smaller.
    """
    found, truth = np.asarray(found, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if found.shape != truth.shape:
        return float("inf")
    size = max(float(np.linalg.norm(truth)), least)
    error = float(np.linalg.norm(found - truth)) / (size or 1.0)
    return error if np.isfinite(error) else float("inf")


def compare(found: Record, truth: Record) -> dict[str, Error]:
    """The worst relative error of each kind: "loss", "grad", "weights" (with buffers), "grad_norm"."""
    kept = {**found.weights, **found.buffers}
    return {
        "loss": _worst(_by_step("loss", found.losses, truth.losses)),
        "grad": max(by_parameter(found, truth).values(), key=lambda error: error.value),
        "weights": _worst(
            (relative(kept.get(name, np.nan), weight), f"{name} after {len(truth.losses)} steps")
            for name, weight in {**truth.weights, **truth.buffers}.items()
        ),
        "grad_norm": _worst(_by_step("gradient norm", found.grad_norms, truth.grad_norms)),
    }


def by_parameter(found: Record, truth: Record) -> dict[str, Error]:
    """The worst relative error of each parameter's gradient over all steps."""
    steps = [
        (number, step, of_truth, LEAST * _together(of_truth))
        for number, (step, of_truth) in enumerate(zip(found.gradients, truth.gradients, strict=True))
    ]
    return {
        name: _worst(
            (relative(step.get(name, np.nan), of_truth[name], least), f"gradient of {name} at step {number}")
            for number, step, of_truth, least in steps
        )
        for name in truth.gradients[0]
    }


def _together(gradients: Mapping[str, np.ndarray]) -> float:
    """The norm of all."""
    return float(np.linalg.norm([np.linalg.norm(np.asarray(gradient, np.float64)) for gradient in gradients.values()]))


def _by_step(what: str, found: Sequence[float], truth: Sequence[float]) -> Iterator[tuple[float, str]]:
    for step, (value, wanted) in enumerate(zip(found, truth, strict=True)):
        yield relative(value, wanted), f"{what} at step {step}"


def _worst(errors: Iterator[tuple[float, str]]) -> Error:
    return Error(*max(errors, key=lambda error: error[0]))
