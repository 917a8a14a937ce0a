"""What ZeRO and FSDP cost, in closed form: partition, transfers and memory of every stage (spec MEM-1..3, Z-1..4, FSDP-1).

A *part* is what one collective moves: a bucket in stages 1 and 2, a unit in stage 3. It lies in one flat buffer, padded
so that the N ranks of the shard group hold equal pieces. Sizes are bytes or elements as named. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.axes.data.cost import SCALAR, buckets
from shoal.spec.inventory import Parameter
from shoal.transfer import Transfer, traffic

ROOT = ("embedding", "head")  # with a tied head both units use one matrix, so they are one unit


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


def partition(parameters: Sequence[Parameter], stage: int, bucket_bytes: float, width: int) -> list[list[Parameter]]:
    """The parameters in parts: buckets in backward order for stages 1 and 2, units in forward order for stage 3."""
    if stage < 3:  # stage 0 is plain data parallelism
        return buckets(parameters, bucket_bytes, width)
    units: dict[str, list[Parameter]] = {}
    tied = not any(parameter.name == "head.weight" for parameter in parameters)
    for parameter in parameters:
        unit = "root" if tied and parameter.unit in ROOT else parameter.unit
        units.setdefault(unit, []).append(parameter)
    return list(units.values())


def step_transfers(
    sizes: Sequence[int], cut: Sharding, rank: int, replica: int, micro_batches: int
) -> Iterator[Transfer]:
    """Transfers of one training step on one rank, beside those of the loss.

    sizes: elements of the parts. rank, replica: this rank's places in the shard and the replicate group.
    Per micro-batch stage 2 reduce-scatters and stage 3 gathers twice and reduce-scatters; stage 1, and what crosses
    replicas, once a step. With N ranks and Psi elements, one direction: stages 1 and 2 (N-1)/N (w + g) Psi, stage 3
    (N-1)/N (2 w + g) Psi per micro-batch, w and g the widths.
    """
    last = micro_batches - 1
    if cut.ranks > 1:
        for size in sizes:
            yield from _part_transfers(padded(size, cut.ranks), cut, rank, micro_batches)
        if cut.stage == 3:
            yield from _gathers([padded(size, cut.ranks) for size in sizes], cut, rank, micro_batches)
        sent, received = traffic("all_reduce", 1, SCALAR, cut.ranks, rank)
        yield Transfer("optimizer", cut.shard_axis, "all_reduce", sent, received)  # squares for the gradient norm
    if cut.replicas > 1:
        for size in sizes:
            piece = padded(size, cut.ranks) // cut.ranks
            sent, received = traffic("all_reduce", piece, cut.reduce_width, cut.replicas, replica)
            yield Transfer("backward", "replicate", "all_reduce", sent, received, micro_batch=last)


def _part_transfers(whole: int, cut: Sharding, rank: int, micro_batches: int) -> Iterator[Transfer]:
    """Gradients of one part, and in stages 1 and 2 its updated weights."""
    last = micro_batches - 1
    reduce = "all_reduce" if cut.stage == 1 and cut.literal else "reduce_scatter"
    sent, received = traffic(reduce, whole, cut.reduce_width, cut.ranks, rank)
    for micro_batch in range(micro_batches) if cut.stage > 1 else (last,):
        yield Transfer("backward", cut.shard_axis, reduce, sent, received, micro_batch=micro_batch)
    if cut.stage < 3:
        yield Transfer(
            "optimizer", cut.shard_axis, "all_gather", *traffic("all_gather", whole, cut.width, cut.ranks, rank)
        )


def _gathers(wholes: Sequence[int], cut: Sharding, rank: int, micro_batches: int) -> Iterator[Transfer]:
    """Stage 3's all-gathers: every unit in forward; in backward again those that were freed."""
    again = {"always": wholes, "keep_last": wholes[:-1], "never": ()}[cut.reshard]
    for micro_batch in range(micro_batches):
        for phase, gathered in (("forward", wholes), ("backward", again)):
            for whole in gathered:
                sent, received = traffic("all_gather", whole, cut.width, cut.ranks, rank)
                yield Transfer(phase, cut.shard_axis, "all_gather", sent, received, micro_batch=micro_batch)


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
    """The most that comes on top while a step runs, by category (spec MEM-3); parts as `partition` gives them.

    gathered: in stage 3 a unit and the one that is fetched meanwhile, beside what is kept from forward to backward.
    buckets: in stages 2 and 3 the whole gradient that fills and the one that is on its way, in backward order.
    """
    wholes = [padded(size, cut.ranks) for size in sizes]
    gathered = cut.width * _gathered_peak(wholes, list(kept) or [False] * len(wholes)) if cut.stage == 3 else 0
    pairs = [a + b for a, b in zip(wholes, wholes[1:], strict=False)] or wholes
    return {"gathered": gathered, "buckets": cut.reduce_width * max(pairs) if cut.stage > 1 else 0}


def kept_units(units: Sequence[str], reshard: str) -> list[bool]:
    """Which units stay gathered from forward to backward. units: their names in forward order.

    A root, whose matrix is used at both ends of the model, always does.
    """
    last = len(units) - 1
    return [name == "root" or reshard == "never" or (reshard == "keep_last" and i == last) for i, name in enumerate(units)]


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
