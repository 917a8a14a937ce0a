"""The layout a person asks for: how many ranks along each axis, and the shorthand `dp=2,tp=2x2,sp,zero=1`. No torch."""

import re
from dataclasses import dataclass, fields
from math import gcd
from typing import Literal

from shoal.spec.convert import build
from shoal.spec.errors import RequestError, alternatives, divisors, refuse_choice, shown
from shoal.spec.fields import check_fields, derived, described, hints, resolve

AXES = ("tp", "cp", "ep", "dp", "pp")
SCHEDULES = {  # by name: chunks per rank where none are asked for; 0 where a file decides
    "naive": 1,
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "breadth-first": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe": 1,
    "dualpipe-v": 2,
    "pipedream": 1,
    "pipedream-vertical": 1,
    "pipedream-2bw": 1,
}
RECOMPUTE = ("none", "selective", "full")
SPELLED_FIRST = ("dp", "tp", "cp", "pp", "ep", "sp", "zero")  # how people write a layout; the other keys follow


@dataclass(frozen=True)
class Layout:
    """How the work is split. micro_batches is resolved: None or 0 becomes 1, or 2 pp with a pipeline, which every
    schedule can use; v: None or 0 becomes what the schedule has; dp: None or 0 becomes as few as ep lets. Raises
    RequestError.
    """

    dp: int = derived(
        "ranks of data parallelism; none or 0 = as many as the other axes leave of torchrun's or srun's ranks, else 1, or as "
        "many as ep needs",
        low=0,
    )
    zero: int = described(0, "ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 weights too", low=0, high=3)
    zero1: Literal["rs+ag", "ar+ag"] = described(
        "rs+ag", "how ZeRO-1 sums gradients: reduce-scatter, or all-reduce as first described (half as much again)"
    )
    reshard: Literal["always", "never", "keep_last"] = described(
        "always", "when ZeRO-3 frees a unit after forward; never gathers once, keep_last spares the last unit's second"
    )
    hsdp: int = described(1, "replicas of hybrid sharding: dp = hsdp x ranks of one shard group", low=1)
    tp: int | str = described(1, "ranks of tensor parallelism: 4, or 2x2 for a square grid", low=1)
    sp: bool = described(False, "sequence parallelism on the tensor ranks, outside attention and MLP")
    regather: bool = described(
        False, "sp: keep only a part of each layer pair's input and gather it a second time in backward"
    )
    pp: int = described(1, "stages of the pipeline", low=1)
    schedule: str = described(
        "1f1b",
        f"order of the pipeline's forwards and backwards: {', '.join(SCHEDULES)}, or a .csv file of instructions",
    )
    v: int = derived("runs of layers (chunks) per stage; none or 0 = what the schedule has", low=0)
    stages: str = described(
        "", "layers of each stage in the order of the model, such as 9-8-8-7; nothing = balanced by the work in them"
    )
    micro_batches: int = derived("parts of a rank's batch, one after the other; none or 0 = as many as fit", low=0)
    cp: int = described(1, "ranks of context parallelism", low=1)
    cp_kind: Literal["ring", "zigzag", "striped", "ulysses", "allgather", "hybrid"] = described(
        "zigzag", "how attention crosses context ranks"
    )
    ulysses: int = described(1, "hybrid: ranks of the all-to-all part, a divisor of cp", low=1)
    ep: int = described(1, "ranks of expert parallelism, carved out of dp x cp (x tp when etp is 1)", low=1)
    etp: int = described(1, "ranks over which one expert's matrices are cut: 1 or tp", low=1)
    dedup: bool = described(
        False, "ep: send a token once to a rank that has several of its experts; two small calls more in each layer"
    )
    recompute: int | str = described(
        "none",
        "what backward computes again: none, selective (norms, rotations, activation functions), full (whole blocks), or the "
        "number of blocks of each stage, from its first on, that are full",
        low=0,
    )
    order: str = described(
        "-".join(AXES), "axes from the fastest link to the slowest; axes of one rank may be left out"
    )

    def __post_init__(self) -> None:
        for derived_from_others in ("dp", "micro_batches", "v"):
            if not getattr(self, derived_from_others):
                object.__setattr__(self, derived_from_others, None)
        check_fields(self, "layout")
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise refuse_choice("layout.schedule", self.schedule, tuple(SCHEDULES), "1f1b")
        chunks = SCHEDULES.get(self.schedule, 1) if self.pp > 1 else 1
        resolve(self, micro_batches=2 * self.pp if self.pp > 1 else 1, v=chunks)
        object.__setattr__(self, "tp", _tensor(self.tp))
        object.__setattr__(self, "recompute", self.recompute or "none")
        if isinstance(self.recompute, str) and self.recompute not in RECOMPUTE:
            raise refuse_choice("layout.recompute", self.recompute, (*RECOMPUTE, "a number of blocks"), "full")
        if self.ulysses > 1 and self.cp_kind == "zigzag":  # the default
            object.__setattr__(self, "cp_kind", "hybrid")
        resolve(self, dp=self.ep // gcd(self.ep, self.cp * (self.tp_size if self.etp == 1 else 1)))
        self._check_divides("hsdp", self.dp, "dp")
        self._check_divides("ulysses", self.cp, "cp")
        self._check_divides("ep", self.token_ranks, "dp x cp x tp" if self.etp == 1 else "dp x cp")
        if self.ulysses > 1 and self.cp_kind != "hybrid":
            why = f"needs cp_kind=hybrid, not {self.cp_kind}; layout.ulysses = 1 would do"
            raise RequestError("layout.ulysses", f"layout.ulysses = {self.ulysses} {why}")
        if self.etp not in (1, self.tp_size):
            why = f"is neither 1 nor tp = {self.tp_size}; {alternatives({1, self.tp_size}, self.etp)} would do"
            raise RequestError("layout.etp", f"layout.etp = {self.etp} {why}")
        self._check_order()

    def _check_divides(self, key: str, whole: int, of: str) -> None:
        value = getattr(self, key)
        if whole % value:
            why = f"does not divide {of} = {whole}; {alternatives(divisors(whole), value)} would"
            raise RequestError(f"layout.{key}", f"layout.{key} = {value} {why}")

    def _check_order(self) -> None:
        given = self.axes
        for axis in given:
            if axis not in AXES:
                raise refuse_choice("layout.order", axis, AXES)
            if given.count(axis) > 1:
                raise RequestError(
                    "layout.order", f"layout.order = {self.order} names {axis} twice; {'-'.join(AXES)} would do"
                )
        sizes = {"tp": self.tp_size, "cp": self.cp, "ep": self.ep, "dp": self.dp, "pp": self.pp}
        missing = [axis for axis, size in sizes.items() if size > 1 and axis not in given]
        if missing:
            raise RequestError(
                "layout.order",
                f"layout.order = {self.order} leaves out {missing[0]} = {sizes[missing[0]]}; "
                f"{'-'.join((*given, *missing))} would do",
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that `order` names, fastest link first."""
        return tuple(axis.strip() for axis in self.order.split("-"))

    @property
    def tp_grid(self) -> tuple[int, int] | None:
        """(rows, columns) of a square tensor grid; None for one-dimensional tensor parallelism."""
        if isinstance(self.tp, int):
            return None
        side = int(self.tp.split("x")[0])
        return side, side

    @property
    def tp_size(self) -> int:
        """Ranks of the tensor axis, whether in a row or in a grid."""
        return self.tp_grid[0] ** 2 if self.tp_grid else int(self.tp)

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens or, with etp = 1, could: the space that ep is carved out of."""
        return self.dp * self.cp * (self.tp_size if self.etp == 1 else 1)

    @property
    def routes_apart(self) -> bool:
        """Whether tensor ranks choose experts for different tokens: their own part of each sequence."""
        return self.tp_size > 1 and (self.etp == 1 or self.sp)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different tokens and sum the gradients of all weights."""
        return ("dp", "cp") if self.cp > 1 else ("dp",)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which ZeRO cuts model states."""
        return ("shard" if self.hsdp > 1 else "dp", *self.data_axes[1:])

    @property
    def world(self) -> int:
        """Number of ranks: dp x cp x tp x pp."""
        return self.dp * self.cp * self.tp_size * self.pp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout of a shorthand such as "dp=2,tp=2x2,sp,zero=1". Raises RequestError."""
        return build(cls, layout_tree(text), "layout")

    def __str__(self) -> str:
        """The shorthand of what is not default; "dp=1" for one process."""
        plain = Layout(pp=self.pp, schedule=self.schedule)
        keys = sorted(
            (field.name for field in fields(self)),
            key=lambda key: SPELLED_FIRST.index(key) if key in SPELLED_FIRST else len(SPELLED_FIRST),
        )
        words = []
        for key in keys:
            value = getattr(self, key)
            if value != getattr(plain, key) or (key == "pp" and value > 1) or (key == "schedule" and value != "1f1b"):
                words.append(key if value is True else f"{key}={value}")
        return ",".join(words) or "dp=1"


def layout_tree(text: str) -> dict[str, str]:
    """The keys and values of a shorthand, still text; a switch such as sp may stand alone. Raises RequestError."""
    examples = {field.name: shown(field.default or 1) for field in fields(Layout)}
    tree: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in word.partition("="))
        if word == key and hints(Layout).get(key) is bool:
            value = "true"
        if not value and key in examples:
            raise RequestError(f"layout.{key}", f"layout.{key} has no value; {key}={examples[key]} would do")
        if key in tree:
            why = f"is given twice in {shown(text)}; {key}={tree[key]} alone would do"
            raise RequestError(f"layout.{key}", f"layout.{key} {why}")
        tree[key] = value
    return tree


def _tensor(tp: int | str) -> int | str:
    """tp as an int, or as "QxQ" in one spelling. Raises RequestError."""
    if isinstance(tp, int):
        return tp
    sides = re.fullmatch(r"\s*([1-9]\d{0,6})\s*[xX]\s*([1-9]\d{0,6})\s*", tp)
    if not sides:
        raise RequestError(
            "layout.tp", f"layout.tp = {shown(tp)} is neither a number of ranks nor a square grid; 4 or 2x2 would do"
        )
    rows, columns = int(sides[1]), int(sides[2])
    if rows != columns:
        raise RequestError(
            "layout.tp", f"layout.tp = {tp} is not square; {rows}x{rows} or {columns}x{columns} would do"
        )
    return f"{rows}x{rows}"
