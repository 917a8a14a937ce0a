"""What ZeRO and FSDP cost, in closed form: partition, transfers and memory of every stage (spec MEM-1..3, Z-1..4, FSDP-1).

A *part* is what one collective moves: a bucket in stages 1 and 2, a unit in stage 3. It lies in one flat buffer, padded
so that the N ranks of the shard group hold equal pieces. Sizes are bytes or elements as named. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.axes.data.cost import SCALAR, buckets
from shoal.spec.inventory import Parameter
from shoal.transfer import Transfer, traffic

ENDS, ROOT = ("embedding", "head"), "root"  # with a tied head both ends use one matrix, so they are one unit


@dataclass(frozen=True)
class Sharding:
    """How the states of a model are cut: the keys of a layout that matter here.

    ranks: of the shard group; replicas: groups that hold the same shards (hybrid shard). literal: stage 1 sums whole
    gradients with an all-reduce instead of a reduce-scatter. reshard: when stage 3 frees a unit after forward.
    width, reduce_width, master_width: bytes per element of weights, of gradients on the wire, of each optimizer state.
    """

    stage: int
    ranks: int
    replicas: int = 1
    literal: bool = False
    reshard: str = "always"
    width: int = 4
    reduce_width: int = 4
    state_width: int = 4
    masters: bool = False

    @property
    def shard_axis(self) -> str:
        return "shard" if self.replicas > 1 else "dp"


def padded(count: int, ranks: int) -> int:
    """Elements of a flat buffer that `ranks` cut into equal pieces."""
    return -(-count // ranks) * ranks


def partition(
    parameters: Sequence[Parameter], stage: int, bucket_bytes: float, width: int
) -> dict[str, list[Parameter]]:
    """The parameters in parts by name: buckets in backward order up to stage 2, units in forward order for stage 3."""
    if stage < 3:  # stage 0 is plain data parallelism
        return {f"bucket {i}": run for i, run in enumerate(buckets(parameters, bucket_bytes, width))}
    units: dict[str, list[Parameter]] = {}
    tied = not any(parameter.name == "head.weight" for parameter in parameters)
    for parameter in parameters:
        units.setdefault(ROOT if tied and parameter.unit in ENDS else parameter.unit, []).append(parameter)
    return units


def step_transfers(
    sizes: Sequence[int], cut: Sharding, rank: int, replica: int, micro_batches: int, kept: Sequence[bool] = ()
) -> Iterator[Transfer]:
    """Transfers of one training step on one rank, beside those of the loss.

    sizes: elements of the parts; kept: which of them stay gathered in stage 3. rank, replica: this rank's places in the
    shard and the replicate group. Per micro-batch stage 2 reduce-scatters, and stage 3 gathers twice and
    reduce-scatters; stage 1, and what crosses replicas, once a step. With N ranks and Psi elements, one direction:
    stages 1 and 2 (N-1)/N (w + g) Psi, stage 3 (N-1)/N (2 w + g) Psi, w and g the widths.
    """
    wholes = [padded(size, cut.ranks) for size in sizes]
    if cut.ranks > 1:
        yield from _gradients(wholes, cut, rank, micro_batches)
        yield from _weights(wholes, cut, rank, micro_batches, kept)
        sent, received = traffic("all_reduce", 1, SCALAR, cut.ranks, rank)
        yield Transfer("optimizer", cut.shard_axis, "all_reduce", sent, received)  # squares for the gradient norm
    if cut.replicas > 1:
        for whole in wholes:
            sent, received = traffic("all_reduce", whole // cut.ranks, cut.reduce_width, cut.replicas, replica)
            yield Transfer("backward", "replicate", "all_reduce", sent, received, micro_batch=micro_batches - 1)


def _gradients(wholes: Sequence[int], cut: Sharding, rank: int, micro_batches: int) -> Iterator[Transfer]:
    """Every part's gradient on its way to the shards: in each micro-batch, in stage 1 only in the last."""
    reduce = "all_reduce" if cut.stage == 1 and cut.literal else "reduce_scatter"
    for micro_batch in range(micro_batches) if cut.stage > 1 else (micro_batches - 1,):
        for whole in wholes:
            sent, received = traffic(reduce, whole, cut.reduce_width, cut.ranks, rank)
            yield Transfer("backward", cut.shard_axis, reduce, sent, received, micro_batch=micro_batch)


def _weights(
    wholes: Sequence[int], cut: Sharding, rank: int, micro_batches: int, kept: Sequence[bool]
) -> Iterator[Transfer]:
    """Every part's weights put together: after the update; in stage 3 before each use, unless still there."""
    if cut.stage < 3:
        for whole in wholes:
            sent, received = traffic("all_gather", whole, cut.width, cut.ranks, rank)
            yield Transfer("optimizer", cut.shard_axis, "all_gather", sent, received)
        return
    for micro_batch in range(micro_batches):
        for phase in ("forward", "backward"):
            for whole, stays in zip(wholes, kept, strict=True):
                if phase == "forward" or not stays:
                    sent, received = traffic("all_gather", whole, cut.width, cut.ranks, rank)
                    yield Transfer(phase, cut.shard_axis, "all_gather", sent, received, micro_batch=micro_batch)


def evaluation_transfers(
    sizes: Sequence[int], cut: Sharding, rank: int, forwards: int, uses: Sequence[int]
) -> Iterator[Transfer]:
    """Transfers of `forwards` forwards without backward, in stage 3: each unit is gathered at each of its `uses`."""
    if cut.stage == 3 and cut.ranks > 1:
        for size, count in zip(sizes, uses, strict=True):
            sent, received = traffic("all_gather", padded(size, cut.ranks), cut.width, cut.ranks, rank)
            calls = count * forwards
            yield Transfer("evaluate", cut.shard_axis, "all_gather", sent * calls, received * calls, calls=calls)


def resting_bytes(sizes: Sequence[int], cut: Sharding, rank: int) -> dict[str, int]:
    """Bytes that `rank` of the shard group holds between steps, by category (spec MEM-2, with padding).

    Per parameter and N ranks, in bfloat16 with float32 states (2 + 2 + 12): stage 1 4 + 12/N, stage 2 2 + 14/N, stage 3
    16/N. Optimizer states are kept for the parameters of the rank's pieces, not for padding.
    """
    wholes = [padded(size, cut.ranks) for size in sizes]
    whole, piece = sum(wholes), sum(wholes) // cut.ranks
    mine = 0
    for size, width in zip(sizes, wholes, strict=True):
        start = rank * width // cut.ranks
        mine += min(max(size - start, 0), width // cut.ranks)
    return {
        "weights": cut.width * (whole if cut.stage < 3 else piece),
        "gradients": cut.reduce_width * (whole if cut.stage < 2 else piece),
        "optimizer": cut.state_width * mine * (3 if cut.masters else 2),
    }


def peak_bytes(sizes: Sequence[int], cut: Sharding, kept: Sequence[bool] = ()) -> dict[str, int]:
    """The most that comes on top while a step runs, by category (spec MEM-3).

    sizes: elements of the parts in the order of `partition`; kept: which of them stay gathered in stage 3.

    gathered: in stage 3 a unit and the one that is fetched meanwhile, beside what is kept from forward to backward.
    buckets: in stages 2 and 3 the whole gradient that fills and the one that is on its way, in backward order.
    """
    wholes = [padded(size, cut.ranks) for size in sizes]
    gathered = cut.width * _gathered_peak(wholes, list(kept) or [False] * len(wholes)) if cut.stage == 3 else 0
    pairs = [a + b for a, b in pairwise(wholes)] or wholes
    return {"gathered": gathered, "buckets": cut.reduce_width * max(pairs) if cut.stage > 1 else 0}


def kept_units(units: Sequence[str], reshard: str) -> set[str]:
    """Which units stay gathered from forward to backward. units: their names in forward order.

    A root, whose matrix is used at both ends of the model, always does.
    """
    kept = {"always": set(), "keep_last": {units[-1]}, "never": set(units)}[reshard]
    return kept | ({ROOT} & set(units))


def _gathered_peak(wholes: Sequence[int], kept: Sequence[bool]) -> int:
    """The most elements gathered at once in one forward and backward, walked unit by unit."""
    last, held, peak = len(wholes) - 1, set[int](), 0
    for unit in range(last + 1):  # forward: this unit and the next
        held |= {unit, min(unit + 1, last)}
        peak = max(peak, sum(wholes[place] for place in held))
        if not kept[unit]:
            held.discard(unit)
    for unit in range(last, -1, -1):  # backward: this unit and the one before, until this one's gradients have left
        held |= {unit, max(unit - 1, 0)}
        peak = max(peak, sum(wholes[place] for place in held))
        if not (kept[unit] and unit == 0):
            held.discard(unit)
    return peak
