"""What ranks share of a parameter: partial gradients become sums and the norm counts once, in buffers cut anywhere."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from shoal.axes.flat import Flat, Held
from shoal.axes.piece import Share, everything
from shoal.axes.shares import Shares
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.spec.inventory import inventory
from shoal.spec.job import DataSpec, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec
from shoal.verify.assemble import assembled

MODEL = ModelSpec(
    layers=1, hidden=8, heads=8, head_size=4, kv_heads=2, ffn=10, vocab=13, positions_max=8, qk_norm=True,
    qkv_bias=True, output_bias=True,
)  # fmt: skip


def job_of(layout):
    return Job(MODEL, Layout.parse(layout), Machine(), DataSpec(sequence=8), TrainSpec())


def gradient(name, rank):
    """A made-up gradient of a whole parameter, as one rank found it."""
    names = {parameter.name: number for number, parameter in enumerate(inventory(MODEL))}
    shape = next(parameter.shape for parameter in inventory(MODEL) if parameter.name == name)
    return np.random.default_rng((names[name], rank)).normal(size=shape)


def part(piece, whole):
    kept = np.zeros(piece.shape)
    piece.take(whole, kept)
    return kept


@pytest.mark.parametrize("layout", ["tp=2", "tp=4", "tp=4,sp", "tp=8,sp", "tp=2x2"])
def test_partial_gradients_become_sums_and_everything_counts_once(pool, layout):
    """Rows that every rank finds a part of are summed over those who keep them; all else stays as it is."""
    job = job_of(layout)
    mesh, ranks = mesh_of(job), range(job.layout.world)
    found, squares, calls = zip(*pool.run(summed, job.layout.world, job), strict=True)
    wanted = []
    for rank in ranks:
        kept = {}
        for piece in pieces_of(job, rank):
            name = piece.parameter.name
            kept[name] = part(piece, gradient(name, 0))
            for row in range(piece.shape[0]):
                axes = tuple(share.axis for share in piece.shares if share.partial and share.start <= row < share.stop)
                if axes:
                    others = mesh.group(axes, rank)
                    kept[name][row] = sum(part(piece, gradient(name, other))[row] for other in others)
        wanted.append(kept)
        for name, values in kept.items():
            np.testing.assert_allclose(found[rank][name], values, rtol=1e-13, err_msg=f"{name} on rank {rank}")
        assert calls[rank] == {(axis, "all_reduce"): 1 for axis in partial_axes(pieces_of(job, rank), mesh)}
    whole = assembled(wanted, [pieces_of(job, rank) for rank in ranks])
    assert sum(squares) == pytest.approx(sum((values**2).sum() for values in whole.values()), rel=1e-13)


def partial_axes(pieces, mesh):
    return {share.axis for piece in pieces for share in piece.shares if share.partial and mesh.size(share.axis) > 1}


def summed(rank, world, job):
    """This rank's gradients after the sum, their counted squares, and its calls, with its buffer cut into three."""
    here = World(mesh_of(job), rank, Ledger())
    pieces = pieces_of(job, rank)
    flat, buffer = filled(pieces, rank)
    cuts = [0, len(buffer) // 3, len(buffer) // 2 + 1, len(buffer)]
    held = [Held(buffer[start:stop], flat.spans(start, stop)) for start, stop in pairwise(cuts)]
    shares = Shares(held, pieces, here.group)
    shares.sum()
    squares = float(shares.squares(here.device))
    calls = {(transfer.axis, transfer.op): transfer.calls for transfer in here.ledger.transfers()}
    here.close()
    return {slot.name: slot.view(buffer).numpy() for slot in flat.slots}, squares, calls


def filled(pieces, rank):
    """A flat buffer of gradients: this rank's own where they are partial, else the same on all ranks."""
    named = [(piece.parameter.name, nn.Parameter(torch.zeros(piece.shape))) for piece in pieces]
    flat = Flat.of(named, {piece.parameter.name for piece in pieces if piece.parameter.decay})
    buffer = torch.zeros(flat.elements, dtype=torch.float64)
    for piece in pieces:
        slot = next(slot for slot in flat.slots if slot.name == piece.parameter.name)
        values = part(piece, gradient(slot.name, 0))
        for share in piece.shares:
            if share.partial:
                rows = slice(share.start, share.stop)
                values[rows] = part(piece, gradient(slot.name, rank))[rows]
        slot.view(buffer).copy_(torch.from_numpy(values))
    return flat, buffer


def test_alone_nothing_is_summed_and_everything_counts():
    job = job_of("dp=1")
    pieces, here = pieces_of(job, 0), World.single()
    flat, buffer = filled(pieces, 0)
    before = buffer.clone()
    shares = Shares([Held(buffer, flat.spans(0, len(buffer)))], pieces, here.group)
    shares.sum()
    assert torch.equal(buffer, before) and here.ledger.transfers() == []
    assert float(shares.squares(here.device)) == pytest.approx(float(before.square().sum()), rel=1e-13)


def test_a_rank_that_counts_nothing_adds_zero_and_bfloat16_is_squared_in_float32_at_least(pool):
    (first, second) = pool.run(squares_in_bfloat16, 2)
    exact = float(torch.linspace(0.1, 1, 1000).bfloat16().double().square().sum())
    assert first == pytest.approx(exact, rel=1e-6) and second == 0


def squares_in_bfloat16(rank, world):
    """Squares of a norm that both ranks keep."""
    job = job_of("tp=2")
    here = World(mesh_of(job), rank, Ledger())
    (entry,) = (parameter for parameter in inventory(MODEL) if parameter.name == "head.norm.weight")
    piece = everything(replace(entry, shape=(1000,)), [Share("tp", 0, 1000, partial=False)])
    parameter = nn.Parameter(torch.zeros(1000))
    flat = Flat.of([(entry.name, parameter)], set())
    shares = Shares([Held(torch.linspace(0.1, 1, 1000).bfloat16(), flat.spans(0, 1000))], [piece], here.group)
    squares = shares.squares(here.device)
    here.close()
    assert squares.dtype == torch.float64 and squares.shape == (1,)
    return float(squares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_squares_of_millions_of_elements_lose_no_digits(dtype):
    """Added up one after the other in float32 they come out 2e-5 off; in rows 1e-9, of bfloat16 1e-7."""
    here = World.single()
    (entry,) = (parameter for parameter in inventory(MODEL) if parameter.name == "head.norm.weight")
    size = 2_000_000
    buffer = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    spans = Flat.of([(entry.name, nn.Parameter(torch.zeros(size)))], set()).spans(0, size)
    shares = Shares([Held(buffer, spans)], [everything(replace(entry, shape=(size,)))], here.group)
    assert float(shares.squares(here.device)) == pytest.approx(float(buffer.double().square().sum()), rel=5e-7)
