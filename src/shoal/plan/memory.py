"""Composes the axes' memory into the most that one rank holds of each category during a step. No torch.

Every storage counts once, in bytes:

    weights      between steps; in stage 3 of ZeRO this rank's pieces
    gradients    between steps
    optimizer    moments, and float32 copies of bfloat16 weights, wherever they are kept
    gathered     what stage 3 puts together for a while
    buckets      whole gradients on their way to their shards, in stages 2 and 3
    versions     copies of weights that micro-batches under way still use, where a schedule updates between them
    activations  what autograd, and weight gradients that were put off, keep for backward, over all micro-batches alive; with
                 the loss's gradients, which are made in forward

Not among them: tensors that live during an operation or between two, messages under way, the batch itself, and what the
blocks of a micro-batch share (rope's rotation, a window's mask, dropout's keys).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from shoal.axes.pipeline.live import live_versions
from shoal.axes.pipeline.schedules.instruction import Place
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import end_activations
from shoal.axes.tensor2d import cost as tensor2d
from shoal.axes.zero import cost as zero
from shoal.plan.activations import activation_bytes
from shoal.plan.experts import Routed
from shoal.plan.pieces import TIED, mesh_of, names_by_chunk
from shoal.plan.stages import schedule_of
from shoal.plan.traffic import TWICE, Store, stores_of
from shoal.spec.job import WIDTH, Job

CATEGORIES = ("weights", "gradients", "optimizer", "gathered", "buckets", "versions", "activations")


def memory(job: Job, rank: int, routed: Mapping[int, Routed] | None = None) -> dict[str, int]:
    """Bytes by category, of a step in which every target counts.

    routed: by rank of the world what the routers of mixtures of experts sent in it, by which activations are exact; None:
    they are what they are if all sets of experts are equally likely.
    """
    found = Counter(dict.fromkeys(CATEGORIES, 0))
    for store in stores_of(job, rank):
        found.update(zero.resting_bytes(store.parts, store.cut, store.shard))
        if store.cut.stage > 1:
            # Where weights are updated in between, no two backwards of a rank overlap.
            overlap = job.layout.pp > 1 and schedule_of(job).versions == "flush"
            found.update(_pipelined(job, rank, store) if overlap else zero.peak_bytes(store.parts, store.cut))
    if job.layout.pp > 1:
        copies = max(live_versions(schedule_of(job), Place(mesh_of(job).coordinate("pp", rank), 0))) - 1
        found["versions"] = copies * found["weights"]
    found["activations"] = activation_bytes(job, rank, _ends(job), routed)
    return dict(found)


def _pipelined(job: Job, rank: int, store: Store) -> dict[str, int]:
    """The most that is whole at once in a pipeline, along the instructions of this rank.

    A chunk's whole gradients are there from the first of its backwards to the end of the one that completes them, B or W; its
    gathered weights, from the block that needs them on, to the end of B or I; those that are kept, to the step's last.
    """
    cut, parts = store.cut, store.parts
    wholes = {name: zero.padded(size, cut.ranks) for name, size in zip(parts, zero.sizes(parts), strict=True)}
    place = mesh_of(job).coordinate("pp", rank)
    by_chunk = [
        {name for name in wholes if name.startswith(f"chunk {chunk} ") or (name == TWICE and TIED in names)}
        for chunk, names in enumerate(names_by_chunk(job, rank))
    ]
    kept = zero.kept_units(list(parts), cut)
    order = list(schedule_of(job).instructions(place))
    last = {x.chunk: x for x in order if x.kind in "BW"}  # a later one takes the place of an earlier one
    filled, gathered, most = set[str](), set[str](), Counter[str]()

    def meet(category: str, names: set[str]) -> None:
        most[category] = max(most[category], sum(wholes[name] for name in names))

    for x in order:
        own = by_chunk[x.chunk]
        if x.kind == "F":
            for used in _together(own):
                meet("gathered", gathered | used)
                gathered |= used & kept
        elif x.kind in "BIW":
            filled |= own if x.kind in "BW" else {name for name in own if _made_early(store, name)}
            meet("buckets", filled)
        if x.kind in "BI":
            meet("gathered", gathered | own)
            gathered -= own - kept
        if x.kind in "BW":
            filled -= own - {TWICE}  # which leaves when the step ends
        if last[x.chunk] == x:
            gathered -= own - {TWICE}
    gathers = cut.width if cut.stage == 3 else 0
    return {"gathered": gathers * most["gathered"], "buckets": cut.reduce_width * most["buckets"]}


def _together(units: set[str]) -> Iterator[set[str]]:
    """Units of a chunk that one module needs at once: with the embedding and the head, the matrix that both use."""
    tied = {name for name in units if name.split()[-1] == TWICE}
    for name in units - tied:
        yield {name} | (tied if name.split()[-1] in zero.ENDS else set())
    yield tied


def _made_early(store: Store, name: str) -> bool:
    """Whether I makes any of a part's gradients: all but those of the linear layers in blocks, which are left to W, of
    which the gate of shared experts is none.
    """
    return any(
        not parameter.unit.startswith("blocks.")
        or (not parameter.decay and "norm" in parameter.name)
        or parameter.name.endswith("shared_gate.weight")
        for parameter in store.parts[name]
    )


def _ends(job: Job) -> tuple[int, int]:
    """What the embedding and the head keep of a micro-batch."""
    layout, model, width = job.layout, job.model, WIDTH[job.train.dtype]
    if layout.tp_grid:
        grid = tensor2d.Grid(layout.tp_grid[0], 0, 0, job.micro_batch, job.own_sequence, width)
        return tensor2d.end_activations(grid, model)
    shape = Shape(job.micro_batch, job.own_sequence, model.hidden, width)
    return end_activations(model, shape, Axis(layout.tp_size, 0, layout.sp))
