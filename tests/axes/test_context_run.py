"""Context parallelism running: every kind under every mask against a plain softmax on one process; bytes against cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.axes.context import cost, kernel, order, tiles
from shoal.axes.context.ring import Ring
from shoal.axes.context.run import ContextAttention
from shoal.comm.ledger import Ledger
from shoal.comm.world import Group, World
from shoal.mesh import Mesh

BATCH, SIZE = 3, 4  # sequences, head size
KINDS = ("ring", "zigzag", "striped", "allgather", "ulysses", "hybrid")
HEADS = {"mha": (8, 8), "gqa": (8, 4), "mqa": (8, 1)}
THREE = {"mha": (6, 6), "gqa": (6, 3), "mqa": (6, 1)}  # heads that three ranks can share out
MASKS = ("causal", "full", "documents", "window", "documents and window", "full documents", "scattered documents")


def length(ranks):
    """A sequence that every kind can cut."""
    return 24 if ranks == 3 else 32


def random(*key, shape):
    return torch.from_numpy(np.random.default_rng(key).normal(size=shape))


def inputs(ranks, heads):
    """Whole q, k, v and the weights of the loss."""
    a, g = (THREE if ranks == 3 else HEADS)[heads]
    s = length(ranks)
    return [random(i, shape=(BATCH, s, n, SIZE)) for i, n in enumerate((a, g, g, a))]


def mask_of(name, sequence):
    """Keywords of ContextAttention.view."""
    rng = np.random.default_rng(9)
    packed = np.sort(rng.integers(0, 4, (BATCH, sequence)), 1)
    return {
        "causal": {},
        "full": {"causal": False},
        "documents": {"documents": packed},
        "window": {"window": 5},
        "documents and window": {"documents": packed, "window": 5},
        "full documents": {"documents": packed, "causal": False},
        "scattered documents": {"documents": rng.integers(0, 3, (BATCH, sequence))},
    }[name]


def truth(q, k, v, causal=True, window=None, documents=None):
    """A plain softmax over dense scores."""
    s, shared = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    back = torch.arange(s)[:, None] - torch.arange(s)
    seen = (back >= 0 if causal else back == back)[None].expand(len(q), s, s)
    if window is not None:
        seen = seen & (back.abs() < window)
    if documents is not None:
        seen = seen & torch.from_numpy(documents[:, :, None] == documents[:, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), v)


def attention(kind, group, rank, ulysses=2, **options):
    """The kind over this group; a hybrid's two groups are cut out of it by hand."""
    if kind != "hybrid":
        return ContextAttention(kind, group, **options)
    ring = cut(group, "ring", [tuple(range(p, group.size, ulysses)) for p in range(ulysses)])
    across = cut(group, "ulysses", [tuple(range(i, i + ulysses)) for i in range(0, group.size, ulysses)])
    return ContextAttention(kind, group, ring, across, **options)


def cut(group, axis, partition):
    """This rank's part of a group, when the parts are these."""
    if max(map(len, partition)) == 1:
        return replace(group.alone(), axis=axis)
    made = [torch.distributed.new_group(list(part)) for part in partition]
    return next(
        replace(group, axis=axis, ranks=part, index=part.index(group.index), process_group=process_group)
        for part, process_group in zip(partition, made, strict=True)
        if group.index in part
    )


def group_of(rank, world, **ledger) -> Group:
    return World(Mesh({"cp": world}, ("cp",)), rank, Ledger(**ledger)).group("cp")


def grouping(kind, world):
    return 2 if kind == "hybrid" and world % 2 == 0 else 1


def masks_for(world):
    """All masks on 4 ranks, the four plain ones elsewhere."""
    return MASKS if world == 4 else MASKS[:4]


def every_case(rank, world, kind):
    """Per mask and heads: this rank's output and gradients, and its ledger."""
    torch.set_num_threads(1)
    answers = {}
    group = group_of(rank, world)
    attend = attention(kind, group, rank, grouping(kind, world))
    for heads in HEADS:
        for mask in masks_for(world):
            group.ledger.clear()
            answers[heads, mask] = one_case(attend, inputs(world, heads), mask), group.ledger.transfers()
    return answers


def one_case(attend, whole, mask, sight=None):
    """(out, dq, dk, dv) of this rank's tokens. sight: other keywords of `view` than the mask's."""
    q, k, v = (attend.share(x, 1).requires_grad_() for x in whole[:3])
    view = attend.view(whole[0].shape[1], **(mask_of(mask, whole[0].shape[1]) if sight is None else sight))
    ledger = attend.group.ledger
    with ledger.at(phase="forward", layer=3, micro_batch=1):
        out = attend(q, k, v, view)
    with ledger.at(phase="backward"):
        (out * attend.share(whole[3], 1)).sum().backward()
    return out, q.grad, k.grad, v.grad


def one_process(world, heads, mask):
    q, k, v, weights = inputs(world, heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = truth(q, k, v, **mask_of(mask, q.shape[1]))
    (out * weights).sum().backward()
    return [x.detach().numpy() for x in (out, q.grad, k.grad, v.grad)]


def errors(kind, found, expected):
    """Relative L2 errors of out, dq, dk and dv. found: by rank."""
    world = len(found)
    back = order.inverse(kind, expected[0].shape[1], world, grouping(kind, world))
    whole = [np.concatenate(shares, 1)[:, back] for shares in zip(*found, strict=True)]
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(whole, expected, strict=True)]


def crossing(kind, world, heads, mask, **other):
    a, g = (THREE if world == 3 else HEADS)[heads]
    sight = {key: value for key, value in mask_of(mask, length(world)).items() if key != "documents"}
    return cost.Crossing(kind, world, BATCH, length(world), a, g, SIZE, 8, 8, grouping(kind, world), **sight, **other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_kind_under_every_mask_is_one_process(pool, world, kind):
    """Outputs and gradients, and the bytes that cost.py foretells, call by call."""
    ranks = pool.run(every_case, world, kind)
    for heads in HEADS:
        for mask in masks_for(world):
            case = f"{heads}, {mask}"
            found = [answers[heads, mask][0] for answers in ranks]
            assert max(errors(kind, found, one_process(world, heads, mask))) <= 1e-10, case
            expected = list(cost.transfers(crossing(kind, world, heads, mask), 3, 1))
            for answers in ranks:
                assert same_rows(answers[heads, mask][1], expected), case
            assert expected or world == 1


def same_rows(found, expected):
    return sorted(map(str, found)) == sorted(map(str, expected))


def hybrid_case(rank, world, ulysses):
    attend = attention("hybrid", group_of(rank, world), rank, ulysses)
    whole = inputs(world, "mqa")
    return (
        one_case(attend, whole, "documents and window"),
        attend.places(length(world)),
        attend.group.ledger.transfers(),
    )


@pytest.mark.parametrize(("world", "ulysses"), [(2, 2), (3, 3), (8, 4), (8, 8), (4, 1)])
def test_hybrids_of_other_groupings(pool, world, ulysses):
    """All-to-all alone, ring alone, and both: with fewer KV heads than ranks, documents and a window."""
    expected = one_process(world, "mqa", "documents and window")
    parts, places, ledgers = zip(*pool.run(hybrid_case, world, ulysses), strict=True)
    back = np.argsort(np.concatenate(places))
    for shares, y in zip(zip(*parts, strict=True), expected, strict=True):
        assert np.linalg.norm(np.concatenate(shares, 1)[:, back] - y) <= 1e-10 * np.linalg.norm(y)
    cut = replace(crossing("hybrid", world, "mqa", "documents and window"), ulysses=ulysses)
    for ledger in ledgers:
        assert same_rows(ledger, list(cost.transfers(cut, 3, 1)))


def exact_tiles(rank, world, kind, mask):
    """With tiles as narrow as they come: documents and windows without masks wherever that is possible."""
    tiles.LEAST, before = 1, tiles.LEAST
    try:
        attend = attention(kind, group_of(rank, world), rank)
        return one_case(attend, inputs(world, "gqa"), mask)
    finally:
        tiles.LEAST = before


@pytest.mark.parametrize("kind", ["zigzag", "ulysses"])
@pytest.mark.parametrize("mask", ["documents", "documents and window", "full documents"])
def test_tiles_without_masks(pool, kind, mask):
    assert max(errors(kind, pool.run(exact_tiles, 2, kind, mask), one_process(2, "gqa", mask))) <= 1e-10


def faulty(rank, world, kind, fault):
    """One thing left out: what the numbers above would show."""
    attend = attention(kind, group_of(rank, world), rank)
    whole = inputs(world, "gqa")
    if fault == "documents ignored":
        return one_case(attend, whole, "causal", {})
    if fault == "places of another kind":
        attend.view = ContextAttention("ring", attend.group).view
        return one_case(attend, whole, "documents")
    backward = Ring.backward
    try:  # gradients of keys and values that never come home
        Ring.backward = lambda self, k, v, collect, dtype: backward(
            Ring(self.group.alone(), 1), k, v, lambda _, *block: collect(self.group.index, *block), dtype
        )
        return one_case(attend, whole, "documents")
    finally:
        Ring.backward = backward


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("documents ignored", (True, True, True, True)),
        ("places of another kind", (True, True, True, True)),
        ("gradients stay away", (False, True, True, True)),
    ],
)
def test_what_is_left_out_shows(pool, fault, wrong):
    found = errors("zigzag", pool.run(faulty, 4, "zigzag", fault), one_process(4, "gqa", "documents"))
    assert [error > 1e-3 for error in found[:1] + found[2:]] == [*wrong[:1], *wrong[2:]]


def with_events(rank, world, kind, mask):
    """Ops in the order in which they happen; "compute" when a kernel starts, "home" for a message not to a neighbour."""
    group = group_of(rank, world, trace=True)
    forward, backward = kernel.forward, kernel.backward

    def noted(function):
        def call(*arguments):
            group.ledger.record("kernel", "compute", 0, 0)
            return function(*arguments)

        return call

    kernel.forward, kernel.backward = noted(forward), noted(backward)
    try:
        one_case(attention(kind, group, rank), inputs(world, "gqa"), mask)
    finally:
        kernel.forward, kernel.backward = forward, backward
    return [(event.phase, event.op) for event in group.ledger.events]


def test_the_next_block_is_fetched_while_the_present_one_is_computed(pool):
    fetch = ["send", "receive"]
    for events in pool.run(with_events, 4, "striped", "full"):
        forward, backward = ([op for phase, op in events if phase == name] for name in ("forward", "backward"))
        assert forward == [*fetch, "compute"] * 3 + ["compute"]
        # keys and values as before; from the second on each block's sums leave when it is computed
        assert backward == [*fetch, "compute"] + [*fetch, "compute", *fetch] * 2 + ["compute", *fetch]


def test_every_rank_passes_on_what_it_does_not_compute(pool):
    for rank, events in enumerate(pool.run(with_events, 4, "ring", "causal")):
        names = [op for phase, op in events if phase == "forward"]
        assert names.count("send") == names.count("receive") == 3 and names.count("compute") == rank + 1


def test_a_window_stops_the_ring_where_nobody_sees_further(pool):
    for events in pool.run(with_events, 8, "ring", "window"):  # shares of 4 tokens, 4 tokens back
        names = [op for phase, op in events if phase == "forward"]
        assert names.count("send") == 1
        assert [op for phase, op in events if phase == "backward"].count("send") == 2


class Live(TorchDispatchMode):
    """The most bytes of a dtype that were alive at once in storages of `block` elements or of `world` blocks."""

    def __init__(self, block, world, dtype):
        super().__init__()
        self.sizes = {block * dtype.itemsize, world * block * dtype.itemsize}
        self.dtype, self.made, self.most = dtype, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.dtype == self.dtype:
                storage = x.untyped_storage()
                if storage.nbytes() in self.sizes:
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.made = {key: pair for key, pair in self.made.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return result


def most_live(rank, world, kind):
    """Per direction, the most blocks of keys and values, and of their gradients, alive at once."""
    a, g, s, d = 5, 2, 64, 4
    group = group_of(rank, world)
    attend = attention(kind, group, rank, grouping(kind, world), accumulate=torch.float64)
    q, k, v = (random(i, shape=(1, s // world, n, d)).float().requires_grad_() for i, n in enumerate((a, g, g)))
    block = 2 * k.numel()
    view, counts = attend.view(s, causal=False), {}
    out = None
    for phase in ("forward", "backward"):
        with Live(block, world, torch.float32) as blocks, Live(block, world, torch.float64) as sums:
            if phase == "forward":
                out = attend(q, k, v, view)
            else:
                out.sum().backward()
        counts[phase] = blocks.most, sums.most
    cut = cost.Crossing(kind, world, 1, s, a, g, d, 4, 8, causal=False)
    return counts, block, cost.travelling_bytes(cut)


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_holds_two_blocks_and_a_gather_all(pool, world):
    for kind, blocks in (("zigzag", 2), ("ring", 2), ("striped", 2), ("allgather", world)):
        for counts, block, foretold in pool.run(most_live, world, kind):
            assert counts["forward"] == (4 * block * blocks, 0), kind
            assert counts["backward"][0] == 4 * block * blocks == foretold["blocks"], kind
            if kind != "allgather":  # what its reduce-scatter needs besides is the back end's affair
                assert counts["backward"][1] == foretold["gradients"], kind


def kept(rank, world, kind, heads):
    """Bytes that autograd keeps for backward, each storage once."""
    attend = attention(kind, group_of(rank, world), rank, grouping(kind, world))
    whole = inputs(world, heads)
    q, k, v = (attend.share(x, 1).float().requires_grad_() for x in whole[:3])
    storages = {}

    def keep(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attend(q, k, v, attend.view(whole[0].shape[1]))
    return sum(storages.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", ["mha", "mqa"])
def test_what_is_kept_for_backward_falls_with_the_ranks(pool, kind, heads):
    for world in (1, 4):
        cut = replace(crossing(kind, world, heads, "causal"), width=4)
        assert set(pool.run(kept, world, kind, heads)) == {cost.saved_bytes(cut)}
    if heads == "mha":
        one, four = (cost.saved_bytes(crossing(kind, world, heads, "causal")) for world in (1, 4))
        assert one == 4 * four


def in_bfloat16(rank, world, kind, accumulate):
    attend = attention(kind, group_of(rank, world), rank, accumulate=accumulate)
    whole = [random(i, shape=(1, 256, n, 16)).bfloat16() for i, n in enumerate((4, 2, 2, 4))]
    return [x.float() for x in one_case(attend, whole, "causal", {})]


def test_bfloat16_errors_do_not_grow_with_the_ring(pool):
    whole = [random(i, shape=(1, 256, n, 16)).bfloat16().double() for i, n in enumerate((4, 2, 2, 4))]
    q, k, v = (x.requires_grad_() for x in whole[:3])
    out = truth(q, k, v)
    (out * whole[3]).sum().backward()
    expected = [x.detach().numpy() for x in (out, q.grad, k.grad, v.grad)]
    one = errors("ring", pool.run(in_bfloat16, 1, "ring", None), expected)
    for kind, worlds in (("zigzag", (2, 8)), ("striped", (2, 8)), ("allgather", (2, 4))):
        few, many = (errors(kind, pool.run(in_bfloat16, world, kind, None), expected) for world in worlds)
        # a block's gradients are rounded once more than a whole row's
        assert all(e <= 1.5 * kernels for e, kernels in zip(few, one, strict=True)), (kind, few, one)
        assert all(e <= 1.1 * fewer for e, fewer in zip(many, few, strict=True)), (kind, many, few)
    narrow = errors("zigzag", pool.run(in_bfloat16, 8, "zigzag", torch.bfloat16), expected)
    assert narrow[2] > few[2], "sums of gradients in bfloat16 are less exact"


def test_one_rank_is_silent():
    group = World.single().group("cp")
    q, k, v, _ = inputs(1, "gqa")
    for kind in KINDS:
        attend = ContextAttention(kind, group, group, group)
        torch.testing.assert_close(attend(q, k, v, attend.view(q.shape[1])), truth(q, k, v), rtol=1e-12, atol=1e-12)
        assert attend.share(q, 1).equal(q) and attend.places(32).tolist() == list(range(32))
    assert group.ledger.transfers() == []


def shares(rank, world):
    attend = attention("zigzag", group_of(rank, world), rank)
    tokens = np.arange(48).reshape(2, 24)
    return attend.share(tokens, 1), attend.share(torch.from_numpy(tokens), 1), attend.whole([tokens], 1)


def test_arrays_are_shared_and_put_together(pool):
    results = pool.run(shares, 3)
    for array, tensor, _ in results:
        np.testing.assert_array_equal(array, tensor)
    group = replace(World.single().group("cp"), ranks=(0, 1, 2))
    for kind in (np.asarray, torch.from_numpy):
        whole = ContextAttention("zigzag", group).whole([kind(array) for array, _, _ in results], 1)
        np.testing.assert_array_equal(whole, np.arange(48).reshape(2, 24))
