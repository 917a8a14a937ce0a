"""What ZeRO and FSDP cost, in closed form: partition, transfers and memory of every stage (spec MEM-1..3, Z-1..4, FSDP-1).

A *part* is what one collective moves: a bucket in stages 1 and 2, a unit in stage 3. It lies in one flat buffer, padded
so that the N ranks of the shard group hold equal pieces. Sizes are bytes or elements as named. No torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from shoal.axes.data.cost import SCALAR, buckets
from shoal.axes.piece import Span
from shoal.spec.inventory import Parameter, elements
from shoal.transfer import Transfer, pieces, traffic

ENDS, ROOT = ("embedding", "head"), "root"  # with a tied head both ends use one matrix, so they are one unit

Parts = Mapping[str, Sequence[Parameter]]


@dataclass(frozen=True)
class Sharding:
    """How the states of a model are cut: the keys of a layout that matter here.

    ranks: of the shard group; replicas: groups that hold the same shards (hybrid shard). literal: stage 1 sums whole
    gradients with an all-reduce instead of a reduce-scatter. reshard: when stage 3 frees a unit after forward.
    width, reduce_width, state_width: bytes per element of weights, of gradients on the wire, of each optimizer state; masters:
    whether one of these is a copy of the weights. axis: name of the shard group.
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
    axis: str = "dp"


def padded(count: int, ranks: int) -> int:
    """Elements of a flat buffer that `ranks` cut into equal pieces."""
    return -(-count // ranks) * ranks


def sizes(parts: Parts) -> list[int]:
    """Elements of each part, without padding."""
    return [sum(map(elements, part)) for part in parts.values()]


def partition(
    parameters: Sequence[Parameter], stage: int, bucket_bytes: float, width: int, ends_apart: bool = False
) -> Parts:
    """The parameters in parts by name: buckets in backward order up to stage 2, units in forward order for stage 3.

    ends_apart: embedding and head are units of their own even where they share a matrix, which is not among these.
    """
    if stage < 3:  # stage 0 is plain data parallelism
        return {f"bucket {i}": run for i, run in enumerate(buckets(parameters, bucket_bytes, width))}
    units: dict[str, list[Parameter]] = {}
    tied = not ends_apart and not any(parameter.name == "head.weight" for parameter in parameters)
    for parameter in parameters:
        units.setdefault(ROOT if tied and parameter.unit in ENDS else parameter.unit, []).append(parameter)
    return units


def step_transfers(
    parts: Parts,
    cut: Sharding,
    rank: int,
    replica: int,
    micro_batches: int,
    uses: Mapping[str, int] = MappingProxyType({}),
    sums: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Transfer]:
    """Transfers of one training step on one rank, beside those of the loss.

    parts: as `partition` gives them. rank, replica: this rank's places in the shard and the replicate group. Per
    micro-batch stage 2 reduce-scatters, and stage 3 gathers twice and reduce-scatters; stage 1, and what crosses
    replicas, once a step. With N ranks and Psi elements, one direction: stages 1 and 2 (N-1)/N (w + g) Psi, stage 3
    (N-1)/N (2 w + g) Psi, w and g the widths. uses, sums: parts whose weights are used, or whose gradients are summed, not
    once per micro-batch but so many times a step.
    """
    wholes = {name: padded(size, cut.ranks) for name, size in zip(parts, sizes(parts), strict=True)}
    if cut.ranks > 1:
        yield from _gradients(wholes, cut, rank, micro_batches, sums)
        yield from _weights(wholes, cut, rank, micro_batches, kept_units(list(parts), cut), uses)
        sent, received = traffic("all_reduce", 1, SCALAR, cut.ranks, rank)
        yield Transfer("optimizer", cut.axis, "all_reduce", sent, received)  # squares for the gradient norm
    if cut.replicas > 1:
        for whole in wholes.values():
            sent, received = traffic("all_reduce", whole // cut.ranks, cut.reduce_width, cut.replicas, replica)
            yield Transfer("backward", "replicate", "all_reduce", sent, received, micro_batch=micro_batches - 1)


def offload_transfers(parts: Parts, cut: Sharding, rank: int, place: str) -> Iterator[Transfer]:
    """What an optimizer step fetches from `place` (host, disk) and stores there: every state of this rank (spec BG-6)."""
    for run in own_runs(parts, cut, rank):
        size = run * cut.state_width * (3 if cut.masters else 2)
        yield Transfer("optimizer", place, "fetch", 0, size)
        yield Transfer("optimizer", place, "store", size, 0)


def _gradients(
    wholes: Mapping[str, int], cut: Sharding, rank: int, micro_batches: int, sums: Mapping[str, int]
) -> Iterator[Transfer]:
    """Every part's gradient on its way to the shards: in each micro-batch, in stage 1 only in the last."""
    reduce = "all_reduce" if cut.stage == 1 and cut.literal else "reduce_scatter"
    for micro_batch in range(micro_batches) if cut.stage > 1 else (micro_batches - 1,):
        for name, whole in wholes.items():
            if micro_batches - 1 - micro_batch < sums.get(name, micro_batches):
                sent, received = traffic(reduce, whole, cut.reduce_width, cut.ranks, rank)
                yield Transfer("backward", cut.axis, reduce, sent, received, micro_batch=micro_batch)


def _weights(
    wholes: Mapping[str, int], cut: Sharding, rank: int, micro_batches: int, kept: set[str], uses: Mapping[str, int]
) -> Iterator[Transfer]:
    """Every part's weights put together: after the update; in stage 3 before each use, unless still there."""
    if cut.stage < 3:
        for whole in wholes.values():
            sent, received = traffic("all_gather", whole, cut.width, cut.ranks, rank)
            yield Transfer("optimizer", cut.axis, "all_gather", sent, received)
        return
    shared_out = {name: pieces(uses.get(name, micro_batches), micro_batches) for name in wholes}
    for micro_batch in range(micro_batches):
        for phase in ("forward", "backward"):
            for name, whole in wholes.items():
                if phase == "forward" or name not in kept:
                    sent, received = traffic("all_gather", whole, cut.width, cut.ranks, rank)
                    for _ in range(shared_out[name][micro_batch]):
                        yield Transfer(phase, cut.axis, "all_gather", sent, received, micro_batch=micro_batch)


def evaluation_transfers(
    parts: Parts, cut: Sharding, rank: int, forwards: int, uses: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Transfer]:
    """Transfers of `forwards` forwards without backward, in stage 3: each unit at each use, a root at both ends.

    uses: how often some parts are used in all of them, where it is not once a forward.
    """
    if cut.stage == 3 and cut.ranks > 1:
        for name, size in zip(parts, sizes(parts), strict=True):
            calls = uses.get(name, forwards * (2 if name == ROOT else 1))
            if not calls:
                continue
            sent, received = traffic("all_gather", padded(size, cut.ranks), cut.width, cut.ranks, rank)
            yield Transfer("evaluate", cut.axis, "all_gather", sent * calls, received * calls, calls=calls)


def held_spans(parts: Parts, cut: Sharding, rank: int) -> list[list[Span]]:
    """What lies where in `rank`'s piece of each part: those with weight decay first, as in its flat buffer."""
    held = []
    for part in parts.values():
        piece = padded(sum(map(elements, part)), cut.ranks) // cut.ranks
        first, last = rank * piece, (rank + 1) * piece
        spans: list[Span] = []
        place = 0
        for parameter in sorted(part, key=lambda parameter: not parameter.decay):
            start, stop = max(place, first), min(place + elements(parameter), last)
            if start < stop:
                spans.append(Span(parameter.name, start - place, start - first, stop - first))
            place += elements(parameter)
        held.append(spans)
    return held


def own_runs(parts: Parts, cut: Sharding, rank: int) -> list[int]:
    """Elements of each run that the optimizer of `rank` updates at once: its piece of a part, cut where decay ends."""
    runs = []
    for part in parts.values():
        whole, decayed = sum(map(elements, part)), sum(elements(p) for p in part if p.decay)
        piece = padded(whole, cut.ranks) // cut.ranks
        edges = [min(max(edge - rank * piece, 0), piece) for edge in (decayed, whole)]
        runs += [run for run in (edges[0], edges[1] - edges[0]) if run]
    return runs


def resting_bytes(parts: Parts, cut: Sharding, rank: int) -> dict[str, int]:
    """Bytes that `rank` of the shard group holds between steps, by category (spec MEM-2, with padding).

    Per parameter and N ranks, in bfloat16 with float32 states (2 + 2 + 12): stage 1 4 + 12/N, stage 2 2 + 14/N, stage 3
    16/N; gradients in float32 add 2 (not 4, as where a bfloat16 gradient is kept beside). Optimizer states are kept for
    the parameters of the rank's pieces, not for padding.
    """
    whole = sum(padded(size, cut.ranks) for size in sizes(parts))
    return {
        "weights": cut.width * (whole if cut.stage < 3 else whole // cut.ranks),
        "gradients": cut.reduce_width * (whole if cut.stage < 2 else whole // cut.ranks),
        "optimizer": cut.state_width * (3 if cut.masters else 2) * sum(own_runs(parts, cut, rank)),
    }


def peak_bytes(parts: Parts, cut: Sharding) -> dict[str, int]:
    """The most that comes on top while a step runs, by category (spec MEM-3).

    gathered: in stage 3 a unit and the one that is fetched meanwhile, beside what is kept from forward to backward.
    buckets: in stages 2 and 3 the whole gradient that fills and the one that is on its way, in backward order; beside a
    root's, which backward meets first and leaves last.
    """
    wholes = {name: padded(size, cut.ranks) for name, size in zip(parts, sizes(parts), strict=True)}
    gathered = _gathered_peak(wholes, kept_units(list(parts), cut)) if cut.stage == 3 else 0
    root = wholes.pop(ROOT, 0)
    pairs = [a + b for a, b in pairwise(wholes.values())] or list(wholes.values()) or [0]
    buckets = root + max(pairs) if cut.stage > 1 else 0
    return {"gathered": cut.width * gathered, "buckets": cut.reduce_width * buckets}


def kept_units(units: Sequence[str], cut: Sharding) -> set[str]:
    """Which units stage 3 keeps gathered from forward to backward. units: their names in forward order.

    A root, whose matrix is used at both ends of the model, always stays.
    """
    kept = {"always": set(), "keep_last": set(units[-1:]), "never": set(units)}[cut.reshard]
    return kept | ({ROOT} & set(units))


def _gathered_peak(wholes: Mapping[str, int], kept: set[str]) -> int:
    """The most elements gathered at once in one forward and backward, walked unit by unit."""
    names = list(wholes)
    held, peak = set[str](), 0
    for unit, following in zip(names, [*names[1:], names[-1]], strict=True):  # forward: this unit and the next
        held |= {unit, following}
        peak = max(peak, sum(wholes[name] for name in held))
        held -= {unit} - kept
    for unit, before in zip(reversed(names), [*reversed(names[:-1]), names[0]], strict=True):  # and the one before
        held |= {unit, before}
        peak = max(peak, sum(wholes[name] for name in held))
        held -= {unit} - {ROOT}  # its gradients have left
    return peak
