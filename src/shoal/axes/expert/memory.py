"""What a mixture of experts keeps from forward for backward, in bytes, where its tokens go being given (spec EP-5). No torch.

Exact for the layer that axes/expert/run.py runs eagerly: every tensor that autograd keeps, tables of places and routing
statistics with the rest. It takes the place of a dense block's MLP; axes/tensor/memory.py has what is around it.
"""

from dataclasses import dataclass

import numpy as np

from shoal.axes.expert.cost import COUNT, expected_remote_rows
from shoal.spec.moe import MoESpec

INDEX = 8  # bytes of a place in a table


@dataclass(frozen=True)
class Flow:
    """Tokens of one layer and micro-batch that leave a rank of the expert axis and come to it, its own among both.

    left: choices of its tokens, and left_rows the rows they travel in, which are fewer where a token goes to a rank once.
    came, came_rows: the same of what its experts compute. Means where they come from an expectation.
    """

    left: float
    left_rows: float
    came: float
    came_rows: float

    @classmethod
    def between(cls, choices: np.ndarray, rows: np.ndarray, rank: int) -> "Flow":
        """Of the rank with number `rank` of its axis, when rank i sends rank j choices and rows [i, j]."""
        sums = choices[rank].sum(), rows[rank].sum(), choices[:, rank].sum(), rows[:, rank].sum()
        return cls(*(float(total) for total in sums))

    @classmethod
    def mean(cls, tokens: int, top_k: int, experts: int, ranks: int, once: bool) -> "Flow":
        """If all sets of k experts are equally likely (spec EP-4), as many `tokens` on each of the `ranks`."""
        choices = float(tokens * top_k)
        remote = expected_remote_rows(tokens, top_k, experts, ranks, once) if ranks > 1 and once else 0.0
        rows = remote * ranks / (ranks - 1) if remote else choices
        return cls(choices, rows, choices, rows)


@dataclass(frozen=True)
class Around:
    """What a layer's tokens look like on a rank.

    scopes: sequences, or 1 where balance is over a micro-batch. norm: tokens that the norm before the layer gives; tokens:
    of them, those that this rank chooses experts for; whole: those that enter experts, of which it may compute a part.
    apart: whether it chooses for a copy of its own part. gathered: whether whole is put together from tensor ranks.
    """

    scopes: int
    norm: int
    tokens: int
    whole: int
    apart: bool
    gathered: bool

    @classmethod
    def of(cls, moe: MoESpec, b: int, part: int, own: int, gathered: int) -> "Around":
        """part: tokens of each of `b` sequences between layer pairs; own: of those, this rank's to choose for; gathered:
        tensor ranks whose parts are put together.
        """
        apart = 0 < own < part and b > 1  # of one sequence the part is a view, and so is one without tokens
        scopes = b if moe.balance == "sequence" else 1
        return cls(scopes, b * part, b * own, b * own * gathered, apart, gathered > 1)


@dataclass(frozen=True)
class Sizes:
    """hidden; widths ffn of a routed expert and `shared` of all shared ones on this rank; ranks of the expert axis.

    experts: of this rank. width: bytes of an element; accurate: of one in float32 at least, as routing computes.
    """

    hidden: int
    ffn: int
    shared: int
    experts: int
    ranks: int
    once: bool  # a token travels to a rank once, however many of its experts are there
    width: int

    @property
    def accurate(self) -> int:
        return max(4, self.width)


@dataclass(frozen=True)
class Mixture:
    """Bytes of a layer and micro-batch on a rank: kept from forward to backward; of these `remade` by selective
    recomputation; and what its weight gradients need from I to W, where backward is split.
    """

    kept: float
    remade: float
    waiting: float


def mixture(moe: MoESpec, sizes: Sizes, around: Around, flow: Flow, selective: bool = False) -> Mixture:
    """Of one layer. selective: whether the block makes its norm's output again, for every use of it anew."""
    token = sizes.hidden * sizes.width
    normed = around.tokens * token if around.apart else around.norm * token
    experts_use = sizes.ranks == 1  # the layer's own tokens; else those that came
    gathered = around.whole * token if around.gathered and (experts_use or sizes.shared) else 0
    kept = normed + gathered + _routing(moe, sizes, around) + sum(routed(sizes, around, flow).values())
    kept += _shared(moe, sizes, around)
    remade = normed if selective and not around.apart else 0

    uses = 1 + (0 if around.gathered else experts_use + bool(sizes.shared))
    inputs = normed * (uses if remade else 1) + gathered
    return Mixture(kept, remade, inputs + _waiting(moe, sizes, around, flow))


def routed(sizes: Sizes, around: Around, flow: Flow) -> dict[str, float]:
    """What the routed experts keep.

    arrived: tokens from everywhere. hidden: gate | up of every choice. returned: what experts sent back to be weighted
    here; without duplicates it is summed there. weights: of the choices. tables: which row goes where, int64.
    """
    row, alone = sizes.hidden * sizes.width, sizes.ranks == 1
    stays = not alone and not sizes.once
    entries = flow.left if alone else flow.came
    rows = around.whole if alone else flow.came_rows  # among which the experts' entries pick
    tables = flow.left + 2 * entries + rows + 1 + sizes.experts  # sorted choices; rows, places, bounds; counts
    if not alone:
        tables += 2 * flow.left_rows + around.whole + 1  # which token each row is of: rows, places, bounds
        tables += flow.came if sizes.once else 0  # sorted weights
    return {
        "arrived": 0 if alone else flow.came_rows * row,
        "hidden": entries * 2 * sizes.ffn * sizes.width,
        "returned": flow.left_rows * row if stays else 0,
        "weights": (flow.left if stays else entries) * sizes.accurate,
        "tables": tables * INDEX,
    }


def _routing(moe: MoESpec, sizes: Sizes, around: Around) -> int:
    """Scores, choices and their weights, and what auxiliary losses need."""
    tokens, accurate = around.tokens, sizes.accurate
    numbers = tokens * moe.experts
    if moe.normalised:
        numbers += tokens * moe.top_k + tokens
    if moe.losses:
        numbers += around.scopes * (moe.experts + 1)  # slopes, and tokens that count over all
        numbers += tokens if moe.router == "sigmoid" else 0  # sums of scores
        numbers += tokens * (moe.experts + 1) if moe.z_loss else 0  # logits and the logarithms of their sums
    return numbers * accurate + tokens * moe.top_k * INDEX


def _shared(moe: MoESpec, sizes: Sizes, around: Around) -> int:
    """Gate | up of the shared experts, and the weights they have by the token."""
    if not sizes.shared:
        return 0
    gate = (around.tokens + (around.whole if around.gathered else 0)) * sizes.width if moe.shared_gate else 0
    return around.whole * 2 * sizes.shared * sizes.width + gate + COUNT


def _waiting(moe: MoESpec, sizes: Sizes, around: Around, flow: Flow) -> float:
    """Gradients of outputs, activations between the matrices, rows that came and their tables."""
    entries = flow.left if sizes.ranks == 1 else flow.came
    found: float = around.tokens * moe.experts * sizes.accurate
    found += entries * (sizes.hidden + 3 * sizes.ffn) * sizes.width + (entries + sizes.experts) * INDEX
    found += 0 if sizes.ranks == 1 else flow.came_rows * sizes.hidden * sizes.width
    if sizes.shared:
        outputs = around.whole if around.gathered or around.apart else around.norm
        found += (outputs * sizes.hidden + around.whole * 3 * sizes.shared) * sizes.width + COUNT
    return found
