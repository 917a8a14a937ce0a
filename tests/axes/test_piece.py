"""Pieces of parameters: together they are the whole, each element counts once, and flat buffers may be cut anywhere."""

from itertools import accumulate, pairwise
from math import prod

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.axes.piece import Piece, Run, Share, Span, counted_runs, even, everything, shared_runs
from shoal.axes.tensor.cut import copies
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.spec.inventory import Parameter, Part, elements, inventory
from shoal.spec.job import DataSpec, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec


@given(units=st.integers(1, 40), size=st.integers(1, 5), ranks=st.integers(1, 12))
def test_even_shares_are_equally_long_hold_whole_units_and_cover_the_rows(units, size, ranks):
    runs, lengths = zip(*(even(units * size, units, ranks, index) for index in range(ranks)), strict=True)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == units * size
    assert len(set(lengths)) == 1 and ranks * lengths[0] < (units + ranks) * size
    assert all(run.at == 0 and run.start % size == run.stop % size == 0 for run in runs)
    assert all(run.stop - run.start == lengths[0] for run in runs[: units * size // lengths[0]]), (
        "only the end is short"
    )


def test_more_ranks_than_units_leave_the_last_with_padding_alone():
    assert [even(3, 3, 5, index) for index in range(5)] == [
        (Run(0, 1, 0), 1), (Run(1, 2, 0), 1), (Run(2, 3, 0), 1), (Run(3, 3, 0), 1), (Run(3, 3, 0), 1),
    ]  # fmt: skip


def test_kv_heads_are_copied_only_where_there_are_fewer_than_ranks():
    kv = Part(rows=32, units=2, shared=True)
    assert [copies(kv, ranks) for ranks in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert copies(Part(rows=32, units=2), 8) == 1, "query heads, columns and ids are never copied"


@st.composite
def jobs(draw):
    """Small models of all kinds under tensor layouts that fit them, in a row or in a square."""
    side = draw(st.sampled_from([0, 0, 2, 3]))
    ranks = side or draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    heads = ranks * draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
    assume(kv_heads % ranks == 0 or ranks % kv_heads == 0)
    flags = {key: draw(st.booleans()) for key in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tied")}
    model = ModelSpec(
        layers=1,
        hidden=6,
        heads=heads,
        kv_heads=kv_heads,
        head_size=2,
        ffn=draw(st.integers(1, 20)),
        vocab=draw(st.integers(1, 20)),
        positions_max=4,
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        **flags,
    )
    layout = f"tp={side}x{side}" if side else f"tp={ranks}{draw(st.sampled_from(['', ',sp']))}"
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=4), TrainSpec())


@given(job=jobs())
def test_pieces_of_all_ranks_are_the_whole_and_padding_is_nobodys(job):
    held = [pieces_of(job, rank) for rank in range(job.layout.world)]
    for of_parameter in zip(*held, strict=True):
        parameter = of_parameter[0].parameter
        whole = np.arange(1.0, elements(parameter) + 1).reshape(parameter.shape)
        together = np.zeros(parameter.shape)
        for piece in of_parameter:
            kept = np.zeros(piece.shape)
            piece.take(whole, kept)
            assert piece.local.shape == piece.shape and piece.local.name == parameter.name
            assert np.count_nonzero(kept) == sum(together[there].size for there, _ in piece.blocks())
            once_more = np.where(kept == 0, np.nan, kept)  # padding does not reach the whole
            piece.put(once_more, together)
        np.testing.assert_array_equal(together, whole)


@given(job=jobs())
def test_every_element_counts_once_and_sharers_keep_the_same(job):
    """Counted on the first rank of every axis along which it is shared; partial sums run over ranks with the same rows."""
    mesh, ranks = mesh_of(job), range(job.layout.world)
    held = {rank: pieces_of(job, rank) for rank in ranks}
    for number, parameter in enumerate(inventory(job.model)):
        counts = np.zeros(parameter.shape, dtype=int)
        for rank in ranks:
            piece = held[rank][number]
            axes = {share.axis for share in piece.shares}
            elsewhere = {axis for axis in axes if mesh.coordinate(axis, rank) > 0}
            flat = Span(parameter.name, 0, 0, prod(piece.shape))
            counted = np.zeros(prod(piece.shape), dtype=int)
            for start, stop in counted_runs([flat], {parameter.name: piece}, elsewhere):
                counted[start:stop] += 1
            whole = np.zeros_like(counts)
            piece.put(counted.reshape(piece.shape), whole)
            counts += whole
            for share in piece.shares:
                for other in mesh.group(share.axis, rank):
                    assert share in held[other][number].shares
                    assert rows_of(held[other][number], share) == rows_of(piece, share)
        assert (counts == 1).all(), parameter.name


def rows_of(piece: Piece, share: Share) -> list[int]:
    """Numbers of the whole parameter's elements in a share, in the order in which they lie in the piece; 0 is padding."""
    whole = np.arange(1, elements(piece.parameter) + 1).reshape(piece.parameter.shape)
    kept = np.zeros(piece.shape, dtype=int)
    piece.take(whole, kept)
    return kept[share.start : share.stop].ravel().tolist()


@st.composite
def buffers(draw):
    """Pieces with any shares, overlapping ones too, one after the other in a buffer, which is cut at any places."""
    pieces = []
    for number in range(draw(st.integers(1, 4))):
        shape = (draw(st.integers(1, 6)), draw(st.integers(1, 3)))
        shares = []
        for axis in draw(st.lists(st.sampled_from(["tp", "kv", "column"]), unique=True)):
            start = draw(st.integers(0, shape[0] - 1))
            shares.append(Share(axis, start, draw(st.integers(start + 1, shape[0])), draw(st.booleans())))
        pieces.append(everything(Parameter(f"p{number}", shape, "", True, "zeros", 0.0, None), shares))
    edges = [0, *accumulate(prod(piece.shape) for piece in pieces)]
    cuts = draw(st.sets(st.integers(0, edges[-1]))) | {0, edges[-1]}
    return pieces, edges, sorted(cuts)


def shards(pieces, edges, cuts):
    """For each shard [first, last) of the buffer: where it starts, and its spans."""
    for first, last in pairwise(cuts):
        spans = []
        for piece, (start, stop) in zip(pieces, pairwise(edges), strict=True):
            inside, end = max(start, first), min(stop, last)
            if inside < end:
                spans.append(Span(piece.parameter.name, inside - start, inside - first, end - first))
        yield first, spans


@given(buffer=buffers(), elsewhere=st.sets(st.sampled_from(["tp", "kv", "column"])))
def test_runs_are_those_of_each_element_wherever_a_buffer_is_cut(buffer, elsewhere):
    pieces, edges, cuts = buffer
    named = {piece.parameter.name: piece for piece in pieces}

    def elements_where(chosen) -> list[int]:
        """Elements of the whole buffer in rows that `chosen(piece, row)`."""
        return [
            start + row * piece.shape[1] + column
            for piece, start in zip(pieces, edges, strict=False)
            for row in range(piece.shape[0])
            for column in range(piece.shape[1])
            if chosen(piece, row)
        ]

    def found(runs_of) -> list[int]:
        return [
            first + i for first, spans in shards(pieces, edges, cuts) for run in runs_of(spans) for i in range(*run)
        ]

    def shared(piece: Piece, row: int, axes: set[str], partial: bool = False) -> bool:
        return any(s.axis in axes and s.start <= row < s.stop and s.partial >= partial for s in piece.shares)

    for _, spans in shards(pieces, edges, cuts):
        runs = counted_runs(spans, named, elsewhere)
        assert all(start < stop for start, stop in runs)
        assert all(stop < start for (_, stop), (start, _) in pairwise(runs)), "neighbouring runs are one"
    assert found(lambda spans: counted_runs(spans, named, elsewhere)) == elements_where(
        lambda piece, row: not shared(piece, row, elsewhere)
    )
    for axis in ("tp", "kv", "column"):
        assert found(lambda spans, axis=axis: shared_runs(spans, named, axis)) == elements_where(
            lambda piece, row, axis=axis: shared(piece, row, {axis}, partial=True)
        )
