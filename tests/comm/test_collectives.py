"""Every primitive, on every number of ranks, against NumPy; its ledger rows against a table written by hand."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from shoal.comm import collectives as comm
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh

RANKS = (1, 2, 3, 4, 5, 8)
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1}  # and bytes per element
UNEVEN = (3, 1, 0, 2, 5, 4, 0, 1)  # empty pieces too
TAIL = 3  # elements of the dim that is not cut


class Case(NamedTuple):
    """One call. sizes: each rank's length along `dim`; roots only where the primitive has one; op: of reductions."""

    primitive: str
    dtype: str
    sizes: tuple[int, ...]
    dim: int = 0
    root: int = 0
    op: str = "sum"

    def shape(self, length):
        return (length, TAIL) if self.dim == 0 else (TAIL, length)


def cases(world):
    for dtype, sizes in itertools.product(DTYPES, ((2,) * world, UNEVEN[:world])):
        for op in ("sum", "max", "min"):
            yield Case("all_reduce", dtype, sizes, op=op)
        for root in range(world):
            yield Case("broadcast", dtype, sizes, root=root)
            yield Case("reduce", dtype, sizes, root=root)
            if world > 1:
                yield Case("send", dtype, sizes, root=root)
        for dim in (0, 1):
            yield Case("all_gather", dtype, sizes, dim)
            yield Case("reduce_scatter", dtype, sizes, dim)
            for root in range(world):
                yield Case("scatter", dtype, sizes, dim, root)
                yield Case("gather", dtype, sizes, dim, root)
        yield Case("all_to_all", dtype, sizes)
    yield Case("barrier", "float32", (1,) * world)


def whole(case, rank):
    """Rank's full tensor: small whole numbers, so that every dtype adds them exactly."""
    shape = case.shape(sum(case.sizes))
    return (np.arange(np.prod(shape)).reshape(shape) * (rank + 1) + rank) % 11


def piece(case, rank, of=None):
    """Rank's piece of its own full tensor, or of rank `of`'s."""
    start = sum(case.sizes[:rank])
    return whole(case, rank if of is None else of).take(range(start, start + case.sizes[rank]), axis=case.dim)


def exchanged(case, source, target):
    """What `source` sends to `target` in the all-to-all: its piece `target`, cut in a way that is uneven both ways."""
    length = case.sizes[(source + target) % len(case.sizes)]
    return (np.arange(length * TAIL).reshape(length, TAIL) + 5 * source + target) % 11


def expected(case, rank):
    """The rank's result by NumPy."""
    world, root = len(case.sizes), case.root
    total = sum(whole(case, other) for other in range(world))
    nothing = np.zeros(case.shape(0))
    match case.primitive:
        case "all_reduce":
            combine = {"sum": np.sum, "max": np.max, "min": np.min}[case.op]
            return combine([whole(case, other) for other in range(world)], axis=0)
        case "broadcast":
            return whole(case, root)
        case "reduce":
            return total if rank == root else whole(case, rank)
        case "send":  # from the root to the one after it
            return whole(case, root) if rank == (root + 1) % world else whole(case, rank)
        case "all_gather":
            return np.concatenate([piece(case, other) for other in range(world)], axis=case.dim)
        case "gather":
            joined = np.concatenate([piece(case, other) for other in range(world)], axis=case.dim)
            return joined if rank == root else nothing
        case "reduce_scatter":
            return sum(piece(case, rank, of=other) for other in range(world))
        case "scatter":
            return piece(case, rank, of=root)
        case "all_to_all":
            return np.concatenate([exchanged(case, other, rank) for other in range(world)])
    return np.zeros(0)


def perform(case, group):
    """The rank's result by the primitive."""

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, case.dtype))

    rank, root, sizes = group.index, case.root, list(case.sizes)
    full, own = tensor(whole(case, rank)), tensor(piece(case, rank))
    match case.primitive:
        case "all_reduce":
            return comm.all_reduce(full, group, case.op)
        case "broadcast":
            return comm.broadcast(full, group, root)
        case "reduce":
            return comm.reduce(full, group, root)
        case "send":
            if rank == root:
                return comm.send(full, group, (root + 1) % group.size)
            return comm.receive(full, group, root) if rank == (root + 1) % group.size else full
        case "all_gather":
            return comm.all_gather(own, group, case.dim, None if len(set(sizes)) == 1 else sizes)
        case "gather":
            return comm.gather(own, group, root, case.dim, None if len(set(sizes)) == 1 else sizes)
        case "reduce_scatter":
            return comm.reduce_scatter(full, group, case.dim, None if len(set(sizes)) == 1 else sizes)
        case "scatter":
            return comm.scatter(full if rank == root else tensor(np.zeros(case.shape(0))), group, root, sizes, case.dim)
        case "all_to_all":
            leaving = [exchanged(case, rank, other) for other in range(group.size)]
            arriving = [len(exchanged(case, other, rank)) for other in range(group.size)]
            return comm.all_to_all(tensor(np.concatenate(leaving)), group, [len(part) for part in leaving], arriving)
    comm.barrier(group)
    return torch.zeros(0)


def table(case, rank):
    """(sent, received) bytes of spec COL-2 and COL-3, by hand: rings walked round by round, chains, straight lines."""
    world, row = len(case.sizes), DTYPES[case.dtype] * TAIL
    z, after = [size * row for size in case.sizes], (rank - case.root) % world
    full = sum(z)
    match case.primitive:
        case "all_reduce":  # N pieces of the flat tensor, the first ones an element longer
            elements = sum(case.sizes) * TAIL
            z = [DTYPES[case.dtype] * (elements // world + (i < elements % world)) for i in range(world)]
            sent = sum(z[(rank - k) % world] + z[(rank + 1 - k) % world] for k in range(world - 1))
            received = sum(z[(rank - k - 1) % world] + z[(rank - k) % world] for k in range(world - 1))
            return sent, received
        case "all_gather":  # everything but the piece of the neighbour, who has it; everything but one's own
            return full - z[(rank + 1) % world], full - z[rank]
        case "reduce_scatter":
            return full - z[rank], full - z[(rank - 1) % world]
        case "broadcast":
            return (full if after < world - 1 else 0), (full if after > 0 else 0)
        case "reduce":
            return (full if after > 0 else 0), (full if after != 1 else 0)
        case "scatter":
            return (full - z[rank], 0) if after == 0 else (0, z[rank])
        case "gather":
            return (0, full - z[rank]) if after == 0 else (z[rank], 0)
        case "send":
            return (full if after == 0 else 0), (full if after == 1 else 0)
        case "all_to_all":
            others = [other for other in range(world) if other != rank]
            sent = sum(len(exchanged(case, rank, other)) for other in others)
            return sent * row, sum(len(exchanged(case, other, rank)) for other in others) * row
    return 0, 0


def line_of(world, rank, ledger):
    """World of a single axis."""
    return World(Mesh({"dp": world}, ("dp",)), rank, ledger)


def every_case(rank, world):
    """In each rank: (result, ledger's rows) of every case, in order."""
    ledger = Ledger()
    group = line_of(world, rank, ledger).group("dp")
    answers = []
    for case in cases(world):
        ledger.clear()
        result = perform(case, group)
        assert result.is_contiguous() and result.dtype == getattr(torch, case.dtype)
        answers.append((result, [(row.axis, row.op, row.sent, row.received, row.calls) for row in ledger.transfers()]))
    return answers


@pytest.mark.parametrize("world", RANKS)
def test_every_primitive_gives_numpy_s_result_and_the_table_s_bytes(pool, world):
    answers = pool.run(every_case, world)
    count = 0
    for number, case in enumerate(cases(world)):
        sent = received = 0
        for rank in range(world):
            result, rows = answers[rank][number]
            np.testing.assert_array_equal(result, expected(case, rank), str(case))
            op = case.primitive
            if op == "send":
                op = {0: "send", 1: "receive"}.get((rank - case.root) % world)
            silent = world == 1 or op is None
            assert rows == ([] if silent else [("dp", op, *table(case, rank), 1)]), case
            sent, received = sent + sum(row[2] for row in rows), received + sum(row[3] for row in rows)
            count += 1
        assert sent == received, case
    assert count == world * len(list(cases(world)))


def identities(rank, world):
    """Both sides of each identity of COL-4, on random numbers."""
    group = line_of(world, rank, Ledger()).group("dp")
    random = np.random.default_rng(rank)
    x = torch.from_numpy(random.normal(size=(world * 2, 3)))
    ordered = comm.all_reduce(x.clone(), group)
    scattered = comm.all_gather(comm.reduce_scatter(x, group), group)
    rooted = comm.broadcast(comm.reduce(x.clone(), group, world - 1), group, world - 1)
    sizes = [2] * world
    root_only = x if rank == 0 else x[:0]
    there_and_back = comm.gather(comm.scatter(root_only, group, 0, sizes), group, 0)
    twice = comm.all_to_all(comm.all_to_all(x, group), group)
    return x, ordered, scattered, rooted, (root_only, there_and_back), twice


@pytest.mark.parametrize("world", RANKS)
def test_identities_between_primitives(pool, world):
    ranks = pool.run(identities, world)
    truth = sum(x for x, *_ in ranks)
    for x, ordered, scattered, rooted, (root_only, there_and_back), twice in ranks:
        for total in (ordered, scattered, rooted):
            np.testing.assert_allclose(total, truth, rtol=1e-13)
        np.testing.assert_array_equal(there_and_back, root_only)
        np.testing.assert_array_equal(twice, x)
        assert ordered.tobytes() == ranks[0][1].tobytes(), "all ranks hold the same bits"
        assert scattered.tobytes() == ranks[0][2].tobytes()


def asynchronous_forms(rank, world):
    """Each asynchronous form beside its plain one; several are under way at once."""
    ledger = Ledger()
    group = line_of(world, rank, ledger).group("dp")
    x = torch.arange(world * 2.0) + rank
    handles = [
        comm.all_reduce(x.clone(), group, asynchronous=True),
        comm.all_gather(x, group, asynchronous=True),
        comm.reduce_scatter(x, group, asynchronous=True),
        comm.all_to_all(x, group, asynchronous=True),
    ]
    found = [handle.wait() for handle in handles]
    assert all(handle.wait() is result for handle, result in zip(handles, found, strict=True))  # again is allowed
    calls = [row.calls for row in ledger.transfers()]
    plain = [
        comm.all_reduce(x.clone(), group),
        comm.all_gather(x, group),
        comm.reduce_scatter(x, group),
        comm.all_to_all(x, group),
    ]
    after, before = (rank + 1) % world, (rank - 1) % world
    passed = x
    if world > 1:
        sending = comm.send(x, group, after, asynchronous=True)
        passed = comm.receive(torch.empty_like(x), group, before, asynchronous=True).wait()
        sending.wait()
    return found, plain, passed, calls


@pytest.mark.parametrize("world", (1, 2, 3))
def test_asynchronous_forms_do_the_same(pool, world):
    for rank, (found, plain, passed, calls) in enumerate(pool.run(asynchronous_forms, world)):
        for one, other in zip(found, plain, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(passed, np.arange(world * 2.0) + (rank - 1) % world)
        assert calls == ([] if world == 1 else [1] * 4)


def into_buffers(rank, world, sizes):
    """Gather into a flat buffer from this rank's own piece of it, then reduce-scatter into that piece."""
    group = line_of(world, rank, Ledger()).group("dp")
    buffer = torch.zeros(sum(sizes))
    own = buffer.split(list(sizes))[rank]
    own.fill_(rank + 1.0)
    where = buffer.data_ptr()
    gathered = comm.all_gather(own, group, sizes=sizes, out=buffer)
    assert gathered.data_ptr() == where
    seen = buffer.clone()
    reduced = comm.reduce_scatter(buffer.clone(), group, sizes=sizes, out=own)
    assert reduced.data_ptr() == own.data_ptr()
    return seen, own


@pytest.mark.parametrize("sizes", [(4,), (2, 2, 2), (3, 0, 2)])
def test_flat_buffers_are_filled_in_place(pool, sizes):
    world = len(sizes)
    joined = np.repeat(np.arange(1.0, world + 1), sizes)
    for rank, (seen, own) in enumerate(pool.run(into_buffers, world, sizes)):
        np.testing.assert_array_equal(seen, joined)
        np.testing.assert_array_equal(own, np.full(sizes[rank], (rank + 1.0) * world))


def test_a_group_of_one_hands_back_what_it_got():
    group = World.single().group("dp")
    x = torch.ones(4, 2)
    for result in (
        comm.all_reduce(x, group),
        comm.all_gather(x, group),
        comm.reduce_scatter(x, group),
        comm.broadcast(x, group, 0),
        comm.reduce(x, group, 0),
        comm.scatter(x, group, 0, [4]),
        comm.gather(x, group, 0),
        comm.all_to_all(x, group),
        comm.all_reduce(x, group, asynchronous=True).wait(),
    ):
        assert result is x
    comm.barrier(group)
    assert group.ledger.transfers() == []


def refused(rank, world):
    """The assertion that each wrong call meets before anything is sent."""
    group = line_of(world, rank, Ledger()).group("dp")
    x = torch.ones(4, 2)
    wrong = {
        "autograd": lambda: comm.all_reduce(x.clone().requires_grad_(), group),
        "strided": lambda: comm.all_reduce(x.t(), group),
        "int16": lambda: comm.all_reduce(x.to(torch.int16), group),
        "odd": lambda: comm.reduce_scatter(torch.ones(5), group),
        "sizes": lambda: comm.reduce_scatter(torch.ones(5), group, sizes=[2, 2]),
        "count": lambda: comm.all_gather(x, group, sizes=[4]),
        "announced": lambda: comm.all_gather(x, group, sizes=[3, 3]),
        "out": lambda: comm.all_gather(x, group, out=torch.empty(4, 2)),
        "half": lambda: comm.all_to_all(x, group, [2, 2]),
        "itself": lambda: comm.all_to_all(x, group, [2, 2], [1, 3] if rank == 0 else [3, 1]),
        "scalar": lambda: comm.all_gather(torch.tensor(1.0), group),
        "root": lambda: comm.scatter(x, group, 0, [2, 1]),
    }
    said = {}
    for name, call in wrong.items():
        try:
            call()
        except AssertionError as error:
            said[name] = str(error)
    return list(wrong), said


def test_wrong_calls_are_refused_with_words(pool):
    for names, said in pool.run(refused, 2):
        assert sorted(said) == sorted(names)
        assert all(said.values())
        assert "conjugate" in said["autograd"]
        assert "pass sizes" in said["odd"]
