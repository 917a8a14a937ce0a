"""Ranks, coordinates and groups: processes as an array with one axis per parallelism (spec MESH-1, MESH-2). No torch.

Nothing is enumerated that was not asked for, so a mesh of a hundred thousand ranks costs nothing until it is used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.spec.errors import RequestError, nearest
from shoal.spec.layout import Layout

BASE = ("tp", "cp", "dp", "pp")  # the axes whose product is the world
CARVED = (
    "shard",
    "replicate",
    "ep",
    "edp",
    "eshard",
    "etp",
    "row",
    "column",
    "kv",
    "ring",
    "ulysses",
)  # the axes that divide others anew
PAIRS = (
    "ends",
    "twin",
)  # pairs of pipeline ranks: the first and the last; each rank and the one as far from the other end


@dataclass(frozen=True)
class Identity:
    """What one rank is in every axis at once (spec MESH-2). Parts, shares and stages are counted from 0.

    groups: by axis, the ranks it is together with; holds, exchanges: in words, by axis of more than one rank.
    """

    rank: int
    coordinates: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    holds: dict[str, str]
    exchanges: dict[str, str]


@dataclass(frozen=True)
class _Digit:
    """An axis as one digit of the number that `space` (base axes, inner first) spells."""

    space: tuple[str, ...]
    stride: int
    size: int

    def of(self, number: int) -> int:
        return number // self.stride % self.size


class Mesh:
    """The ranks 0 to world - 1 as an array, its first axis varying fastest.

    sizes: ranks per base axis, and of what is carved out of them: "ep", "etp" (1 or tp), "hsdp" (replicas), "grid" (side
    of a square of tensor ranks), "kv" (tensor ranks that keep the same KV heads) and "ulysses" (context ranks of an all-to-all).
    order: axes from inner to outer; axes of one rank may be left out. "ep" in it says only whether experts (before
    "dp", or absent) or their replicas (after "dp") are the neighbours. Raises RequestError when sizes do not divide.

    Carved axes. The token space is dp x cp, and tp too when etp is 1, flattened in mesh order: "ep" is ep consecutive
    places of it, "edp" the ranks that hold the same experts. dp splits into "shard" (inner) and "replicate". "eshard" are
    the ranks of "edp" inside one replica, so that "edp" is "eshard" times "replicate"; of several replicas, each has to
    hold all experts and to be one run of the token space (ep inner, dp outermost in it), or the mesh has no such axis. A
    square of tensor ranks has "row"s of consecutive ones and "column"s across them; "kv" is a run of consecutive tensor
    ranks. "ulysses" are consecutive context ranks, "ring" goes across them.
    """

    def __init__(self, sizes: Mapping[str, int], order: Sequence[str]):
        self.axes = tuple(axis for axis in order if axis != "ep")
        _check(sizes, tuple(order))
        self.sizes = {axis: sizes.get(axis, 1) for axis in self.axes}
        self.world = math.prod(self.sizes.values())
        self._strides = {
            axis: math.prod(self.sizes[inner] for inner in self.axes[:place]) for place, axis in enumerate(self.axes)
        }
        self._digits = {axis: _Digit((axis,), 1, size) for axis, size in self.sizes.items()}
        self._carve(sizes.get("hsdp", 1), sizes.get("ep", 1), sizes.get("etp", 1), tuple(order))
        self._carve_tensor(sizes.get("grid", 1), sizes.get("kv", 1))
        ulysses = sizes.get("ulysses", 1)
        self._digits["ulysses"] = _Digit(self._space("cp"), 1, ulysses)
        self._digits["ring"] = _Digit(self._space("cp"), ulysses, _quotient(self.size("cp"), ulysses, "ulysses", "cp"))

    @classmethod
    def of(cls, layout: Layout, kv_heads: int = 0) -> "Mesh":
        """The mesh of a layout, in its order; all four base axes are there, also those of one rank.

        kv_heads: of the model, which decide how many tensor ranks keep the same ones; 0 where that is not asked.
        """
        sizes = {"tp": layout.tp_size, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
        side = layout.tp_grid[0] if layout.tp_grid else 1
        kv = max(1, (side if layout.tp_grid else layout.tp_size) // kv_heads) if kv_heads else 1
        carved = {
            "ep": layout.ep,
            "etp": layout.etp,
            "hsdp": layout.hsdp,
            "grid": side,
            "kv": kv,
            "ulysses": layout.ulysses,
        }
        return cls({**sizes, **carved}, (*layout.axes, *(axis for axis in BASE if axis not in layout.axes)))

    def _carve(self, hsdp: int, ep: int, etp: int, order: tuple[str, ...]) -> None:
        shard = _quotient(self.size("dp"), hsdp, "hsdp", "dp")
        self._digits["shard"] = _Digit(self._space("dp"), 1, shard)
        self._digits["replicate"] = _Digit(self._space("dp"), shard, hsdp)
        if etp not in (1, self.size("tp")):
            raise RequestError("layout.etp", f"layout.etp = {etp} is neither 1 nor tp = {self.size('tp')}; 1 would do")
        self._digits["etp"] = _Digit(self._space("tp"), 1, etp)
        tokens = self._space("dp", "cp", "tp") if etp == 1 else self._space("dp", "cp")
        replicas = _quotient(math.prod(self.sizes[axis] for axis in tokens), ep, "ep", " x ".join(tokens) or "dp")
        outer = ep > 1 and "ep" in order and "dp" in order and order.index("ep") > order.index("dp")
        self._digits["ep"] = _Digit(tokens, replicas if outer else 1, ep)
        self._digits["edp"] = _Digit(tokens, 1 if outer else ep, replicas)
        if hsdp == 1:
            self._digits["eshard"] = self._digits["edp"]
            return
        inside = math.prod(self.sizes[axis] for axis in tokens[: tokens.index("dp")]) * shard
        if not outer and inside % ep == 0 and inside * hsdp == ep * replicas:
            self._digits["eshard"] = _Digit(tokens, ep, inside // ep)

    def _carve_tensor(self, side: int, kv: int) -> None:
        tp = self._space("tp")
        across = _quotient(self.size("tp"), side, "tp", "tp") if side > 1 else 1
        assert across in (1, side), f"a grid of {side} x {side} is not tp = {self.size('tp')}"
        self._digits["row"] = _Digit(tp, 1, side)
        self._digits["column"] = _Digit(tp, side, side)
        self._digits["kv"] = _Digit(tp, 1, kv)

    def _space(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in axes)

    def has(self, axis: str) -> bool:
        """Whether there is such an axis; only "eshard" does not exist everywhere."""
        return axis in self._digits or axis in (*BASE, *PAIRS)

    def size(self, axis: str) -> int:
        """Ranks along an axis, base or carved; of a pair 2, though ranks between the ends stand alone."""
        if axis in PAIRS:
            return min(2, self.size("pp"))
        return self._digit(axis).size

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along every base axis. Raises RequestError for a rank outside the mesh."""
        self._check_rank(rank)
        return {axis: rank // self._strides[axis] % size for axis, size in self.sizes.items()}

    def coordinate(self, axis: str, rank: int) -> int:
        """The place of a rank along one axis, base or carved."""
        self._check_rank(rank)
        if axis in PAIRS:
            return self.group(axis, rank).index(rank)
        digit = self._digit(axis)
        return digit.of(self._number(rank, digit.space))

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at coordinates along all base axes; those of one rank may be left out. Raises RequestError."""
        for axis in (*self.sizes, *coordinates):
            size = self.sizes.get(axis)
            place = coordinates.get(axis, 0 if size == 1 else -1)
            if size is None or not 0 <= place < size:
                allowed = f"0 to {size - 1} along {axis}" if size else ", ".join(self.axes)
                given = ", ".join(f"{name}={value}" for name, value in coordinates.items())
                raise RequestError("coordinates", f"coordinates {given} are not in this mesh; {allowed} would do")
        return sum(coordinates.get(axis, 0) * stride for axis, stride in self._strides.items())

    def group(self, axes: str | tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` only along these axes, base or carved."""
        self._check_rank(rank)
        members = [rank]
        for axis in _names(axes):
            if axis in PAIRS:
                members = [other for member in members for other in self._pair(axis, member)]
                continue
            members = [other for member in members for other in self._along(self._digit(axis), member)]
        assert len(set(members)) == len(members), f"the axes {axes} overlap"
        return tuple(sorted(members))

    def groups(self, axes: str | tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups of these axes, by their first rank: a partition of the world."""
        pairs = [axis for axis in _names(axes) if axis in PAIRS]
        digits = [digit for digit in map(self._digit, set(_names(axes)) - set(pairs)) if digit.size > 1]
        firsts = (
            rank
            for rank in range(self.world)
            if not any(digit.of(self._number(rank, digit.space)) for digit in digits)
            and all(min(self._pair(axis, rank)) == rank for axis in pairs)
        )
        return [self.group(axes, rank) for rank in firsts]

    def identity(self, rank: int) -> Identity:
        """All roles of one rank, found without looking at the others."""
        carved = [axis for axis in CARVED if self._carves(axis)]
        groups = {axis: self.group(axis, rank) for axis in (*self.axes, *carved)}
        shared = {axis: group for axis, group in groups.items() if len(group) > 1}
        return Identity(
            rank,
            self.coordinates(rank),
            groups,
            holds={axis: _holds(axis, self.coordinate(axis, rank), len(group)) for axis, group in shared.items()},
            exchanges={axis: _exchanges(axis, group, rank) for axis, group in shared.items()},
        )

    def _carves(self, axis: str) -> bool:
        """Whether a carved axis says something that the others do not."""
        if axis == "eshard":
            return self.has(axis) and self.size("replicate") > 1 and self.size("ep") > 1
        whole = {"shard": "replicate", "replicate": "replicate", "ep": "ep", "edp": "ep", "etp": "ep"}
        whole |= {"row": "row", "column": "row", "kv": "kv", "ring": "ulysses", "ulysses": "ulysses"}
        return self.size(whole[axis]) > 1

    def _pair(self, axis: str, rank: int) -> set[int]:
        """The pair of pipeline ranks that `rank` belongs to, or itself alone."""
        size = self.size("pp")
        place = self._digit("pp").of(self._number(rank, self._digit("pp").space))
        if axis == "ends" and 0 < place < size - 1:
            return {rank}
        return {rank, rank + (size - 1 - 2 * place) * self._strides.get("pp", 0)}

    def _along(self, digit: _Digit, rank: int) -> list[int]:
        """The ranks that differ from `rank` in one digit."""
        number = self._number(rank, digit.space)
        rest = rank - self._spread(number, digit.space)
        first = number - digit.of(number) * digit.stride
        return [rest + self._spread(first + place * digit.stride, digit.space) for place in range(digit.size)]

    def _number(self, rank: int, space: tuple[str, ...]) -> int:
        """A rank's coordinates along `space` as one number, the first axis varying fastest."""
        number, weight = 0, 1
        for axis in space:
            number += rank // self._strides[axis] % self.sizes[axis] * weight
            weight *= self.sizes[axis]
        return number

    def _spread(self, number: int, space: tuple[str, ...]) -> int:
        """The rank whose coordinates along `space` spell `number` and are 0 elsewhere."""
        rank = 0
        for axis in space:
            number, place = divmod(number, self.sizes[axis])
            rank += place * self._strides[axis]
        return rank

    def _digit(self, axis: str) -> _Digit:
        if axis in self._digits:
            return self._digits[axis]
        if axis in BASE:
            return _Digit((), 1, 1)
        there = (*BASE, *filter(self.has, CARVED))
        near = nearest(axis, there) or "dp"
        raise RequestError("axis", f"axis {axis} is not one of {', '.join(there)}; {near} would do")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise RequestError(
                "rank", f"rank = {rank} is not in a mesh of {self.world}; 0 to {self.world - 1} would do"
            )


def _check(sizes: Mapping[str, int], order: tuple[str, ...]) -> None:
    """Raises RequestError for sizes below one and for axes that the order names twice, not at all or wrongly."""
    for axis, size in sizes.items():
        if size < 1:
            raise RequestError(f"layout.{axis}", f"layout.{axis} = {size} must be at least 1; 1 would do")
        if size > 1 and axis in BASE and axis not in order:
            raise RequestError(
                "layout.order", f"layout.order leaves out {axis} = {size}; {'-'.join((*order, axis))} would do"
            )
    for axis in (*order, *sizes):
        if axis not in (*BASE, "ep", "etp", "hsdp", "grid", "kv", "ulysses") or order.count(axis) > 1:
            raise RequestError(
                "layout.order", f"layout.order = {'-'.join(order)} names {axis} wrongly; {'-'.join(BASE)} would do"
            )


def _quotient(whole: int, part: int, key: str, of: str) -> int:
    if whole % part:
        raise RequestError(f"layout.{key}", f"layout.{key} = {part} does not divide {of} = {whole}; 1 or {whole} would")
    return whole // part


def _names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _holds(axis: str, place: int, size: int) -> str:
    """What a rank keeps because of its place along an axis."""
    what = {
        "tp": "part {} of {} of every attention and MLP matrix",
        "cp": "part {} of {} of every sequence",
        "dp": "share {} of {} of every batch",
        "pp": "stage {} of {} of the layers",
        "shard": "shard {} of {} of its replica's model states",
        "replicate": "replica {} of {}",
        "ep": "part {} of {} of the experts",
        "edp": "copy {} of {} of its experts",
        "eshard": "shard {} of {} of its experts' model states in its replica",
        "etp": "part {} of {} of every matrix of its experts",
        "row": "features {} of {} of its row's tokens",
        "column": "tokens {} of {} of its column's features",
        "kv": "copy {} of {} of its KV heads",
        "ring": "block {} of {} of keys and values",
        "ulysses": "part {} of {} of the heads in attention",
    }
    return what[axis].format(place, size)


def _exchanges(axis: str, group: tuple[int, ...], rank: int) -> str:
    """What a rank exchanges along an axis, how often, with whom."""
    if axis == "pp":
        place = group.index(rank)
        ends = [f"from rank {group[place - 1]}"] if place else []
        ends += [f"to rank {group[place + 1]}"] if place + 1 < len(group) else []
        return f"activations {' and '.join(ends)}, gradients the other way, every micro-batch"
    what = {
        "tp": "partial sums of activations, in every layer, forward and backward,",
        "cp": "keys and values in every attention, and gradients once a step,",
        "dp": "gradients once a step",
        "shard": "shards of model states",
        "replicate": "gradients of its shard once a step",
        "ep": "tokens in every mixture-of-experts layer, there and back,",
        "edp": "gradients of its experts once a step",
        "eshard": "shards of its experts' model states",
        "etp": "partial sums of its experts' outputs in every mixture-of-experts layer",
        "row": "blocks of activations in every matrix product,",
        "column": "blocks of weights in every matrix product,",
        "kv": "gradients of its KV heads once a step",
        "ring": "keys and values in every attention,",
        "ulysses": "heads for tokens in every attention,",
    }
    return f"{what[axis]} with {_listed([other for other in group if other != rank])}"


def _listed(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {names}" + (f" and {len(ranks) - 8:,} more" if len(ranks) > 8 else "")
