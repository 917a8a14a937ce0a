"""Context parallelism in six facts, by kind of crossing (spec CP-1..8)."""

from shoal.axes.card import Card

_CUTS = "sequence, in every activation of the whole model"
_KEEPS = "its share of the tokens: 1/N of all activations"
_REPLICATED = "weights, whose gradients are summed over the context ranks as over data ranks"

RING = Card(
    key="cp_kind=zigzag",
    name="context parallelism, ring attention",
    cuts=_CUTS,
    keeps=_KEEPS,
    replicated=_REPLICATED,
    moves="keys and values: 2 (N-1)/N x b s h_kv elements forward, and in backward the same and their gradients: 6 in all",
    primitive="send and receive, N-1 to the next rank",
    when="in every attention, while the block before is computed; weight gradients once a step",
    pros=(
        "sequences as long as all ranks together can hold",
        "two blocks of keys and values at a time",
        "only neighbours talk, and computing hides it where a share is long enough",
        "any number of heads",
    ),
    cons=(
        "short shares cannot hide the transfers",
        "causal masks need zig-zag (2N pieces) or stripes to load ranks alike",
    ),
    cures=("compute", "memory"),
)
GATHER = Card(
    key="cp_kind=allgather",
    name="context parallelism, gathered keys and values",
    cuts=_CUTS,
    keeps=_KEEPS,
    replicated=f"keys and values of one layer at a time; {_REPLICATED}",
    moves="as the ring, in one call each way",
    primitive="all_gather; in backward again, and reduce_scatter of the gradients",
    when="in every attention; only the own block is computed meanwhile",
    pros=("few, large messages", "any mask and kernel", "any number of heads"),
    cons=("N blocks of keys and values at a time", "little computing hides it"),
    cures=("compute", "memory"),
)
ULYSSES = Card(
    key="cp_kind=ulysses",
    name="context parallelism, Ulysses",
    cuts="sequence; inside attention heads instead",
    keeps=_KEEPS,
    replicated=_REPLICATED,
    moves="queries, keys, values and outputs: (2 h + 2 h_kv) x b s (N-1)/N^2 elements, forward and backward alike",
    primitive="all_to_all, two in forward and two in backward",
    when="before and after every attention; nothing hides it",
    pros=("traffic falls with N: 2/N of a ring's for equal heads", "any mask is balanced", "one kernel call"),
    cons=("no more ranks than heads", "KV heads fewer than ranks are sent several times"),
    cures=("compute", "memory"),
)
HYBRID = Card(
    key="cp_kind=hybrid",
    name="context parallelism, ring of Ulysses groups",
    cuts="sequence; inside attention heads among the ranks of a group",
    keeps=_KEEPS,
    replicated=_REPLICATED,
    moves="as Ulysses among u neighbours, as a ring of N/u ranks across, for 1/u of the heads",
    primitive="all_to_all on the inner ranks, send and receive on the outer",
    when="in every attention, one after the other",
    pros=("more ranks than heads", "all-to-all stays on fast links, the ring crosses slow ones"),
    cons=("u must share out the heads",),
    cures=("compute", "memory"),
)
