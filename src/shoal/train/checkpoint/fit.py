"""Whether a job goes on where a checkpoint ended: the same model, the same data in the same order; any layout. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.spec.build import job_from_tree, job_to_tree
from shoal.spec.errors import RequestError, shown
from shoal.spec.job import Job, TrainSpec
from shoal.train.checkpoint.folder import candidates
from shoal.train.checkpoint.index import Damaged, Index, read_index
from shoal.train.data.naming import named

# What, beside the model, decides which tokens a step trains on and what is random in it.
SAME = ("train.seed", "train.batch", "data.sequence", "data.packing", "data.eval_fraction")


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from; in_place: whether it is one of the run's own folder."""

    path: Path
    index: Index
    in_place: bool


def wanted(train: TrainSpec) -> Path | None:
    """Where the checkpoint to go on from is to be looked for; None to start afresh."""
    if train.resume == "never":
        return None
    return Path(train.out if train.resume == "auto" else train.resume)


def no_checkpoint(train: TrainSpec, damages: Sequence[str]) -> RequestError:
    """The error for a path that a person gave and that holds no good checkpoint; damages: of those that it holds."""
    why = f"no checkpoint that is whole ({damages[0]})" if damages else "no checkpoint"
    return RequestError(
        "train.resume",
        f"train.resume = {named(train.resume)} holds {why}; auto would do, or the folder of a run that has saved some",
    )


def check_start(job: Job) -> None:
    """Refuses at once, before any rank starts, weights that are not there and a checkpoint that cannot be continued, as far
    as its index tells. Raises RequestError.
    """
    weights = job.train.weights
    if weights and not Path(weights).is_file():
        raise RequestError(
            "train.weights", f"train.weights = {named(weights)} is no file; a run's model.safetensors would do"
        )
    path = wanted(job.train)
    if path is None:
        return
    damages = []
    for candidate in candidates(path):
        try:
            return check_fits(job, candidate, read_index(candidate))
        except Damaged as damaged:
            damages.append(str(damaged))  # the ranks will say so
    if job.train.resume != "auto":
        raise no_checkpoint(job.train, damages)


def check_fits(job: Job, path: Path, index: Index, data: str | None = None) -> None:
    """Raises RequestError, with the field, for a checkpoint of another model, another order of the data or other data.

    data: what identifies the job's tokens; None where that is not known yet.
    """
    try:
        before = _flat(job_to_tree(job_from_tree(index.job)))
    except RequestError as error:
        raise RequestError(
            "train.resume",
            f"the checkpoint {named(path)} is of another version of shoal ({error}); one of this version would do",
        ) from None
    now = _flat(job_to_tree(job))
    for name in dict.fromkeys((*before, *now)):
        same = name in SAME or (name.startswith("model.") and name != "model.name")
        if same and now.get(name) != before.get(name):
            raise RequestError(
                name,
                f"{name} = {shown(now.get(name))} is not that of the checkpoint {named(path)}, {shown(before.get(name))}, "
                "which would do; train.weights takes weights alone",
            )
    if data is not None and data != index.data:
        raise RequestError(
            "data.path",
            f"data.path = {named(job.data.path) or 'nothing'} gives other tokens ({data}) than the checkpoint {named(path)} "
            f"was trained on ({index.data}); those would do; train.weights takes weights alone",
        )
    if job.train.steps < index.step:
        raise RequestError(
            "train.steps",
            f"train.steps = {job.train.steps} is less than the {index.step} steps of the checkpoint {named(path)}; "
            f"{index.step} or more would do",
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree's values by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
