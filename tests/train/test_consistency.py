"""Replicas that differ are found, and the parameter and the ranks are named; replicas that do not are left alone."""

import io
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from checkpoints import small
from shoal.cli.main import main
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.launch.local import run_local
from shoal.plan.copies import check_transfers, copies_of
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.train import loop
from shoal.train.checkpoint.state import parts_of
from shoal.train.consistency import CHUNK, Consistency, hash_bits, minority
from shoal.train.data.tokens import TokenWriter
from shoal.train.summary import ReplicasDiffer
from shoal.train.trainer import Trainer
from shoal.verify.audit import audit
from shoal.verify.trial import MadeUpBatches

MOE = {"tied": False, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 8, "shared_experts": 1, "bias": True,
                              "aux_loss": 0.01}, "qkv_bias": False}  # fmt: skip
UNTIED = {"tied": False}
NORM, QKV, DOWN, EMBEDDING = (
    "blocks.0.attention_norm.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.0.mlp.down.weight",
    "embedding.weight",
)


@dataclass(frozen=True)
class Flip:
    """A bit that flips on `rank`: of the element `index` of the whole tensor. named: the ranks that are at fault; others:
    those that hold the same and do not differ. Neither: nobody else holds it.
    """

    kind: str
    name: str
    index: tuple[int, ...]
    rank: int
    named: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    bit: int = 0


# Who holds the same is written down here by hand: ranks are numbered tp first, then cp, dp, pp.
CASES = [
    ("dp=2", {}, {}, [
        Flip("weight", NORM, (3,), 1, (0, 1)),
        Flip("moment2", QKV, (2, 5), 0, (0, 1), bit=63),
    ]),
    ("dp=3", {}, {"batch": 6}, [
        Flip("weight", DOWN, (0, 0), 1, (1,), (0, 2)),
        Flip("weight", DOWN, (15, 23), 0, (0,), (1, 2), bit=63),
        Flip("moment1", EMBEDDING, (60, 15), 2, (2,), (0, 1), bit=40),
        Flip("weight", "head.norm.weight", (15,), 2, (2,), (0, 1)),
    ]),
    ("dp=2", {}, {"dtype": "bfloat16"}, [
        Flip("weight", QKV, (0, 1), 1, (0, 1)),
        Flip("master", QKV, (0, 1), 1, (0, 1), bit=3),
    ]),
    ("dp=2", {}, {"offload": "host", "dtype": "float32"}, [Flip("moment1", QKV, (0, 1), 1, (0, 1))]),
    ("dp=2,zero=1", {}, {}, [
        Flip("weight", DOWN, (1, 1), 1, (0, 1)),
        Flip("weight", NORM, (0,), 0, (0, 1)),
    ]),
    ("dp=2,zero=3", {}, {}, []),
    ("dp=4,zero=1,hsdp=2", {}, {}, [
        Flip("weight", QKV, (1, 1), 2, (2,), (0, 1, 3)),
    ]),
    ("dp=6,zero=3,hsdp=3", {}, {"batch": 6}, [
        Flip("weight", EMBEDDING, (0, 0), 2, (2,), (0, 4)),  # in the first shard of a unit, which even ranks have
        Flip("weight", "head.norm.weight", (15,), 1, (1,), (3, 5)),  # in the last
        Flip("moment2", EMBEDDING, (0, 0), 4, (4,), (0, 2)),
    ]),
    ("tp=2", {}, {}, [
        Flip("weight", NORM, (3,), 1, (0, 1)),
        Flip("moment1", NORM, (3,), 1, (0, 1)),
        Flip("weight", DOWN, (3, 0), 0),
    ]),
    ("tp=4", {}, {}, [
        Flip("weight", NORM, (3,), 1, (1,), (0, 2, 3)),
        Flip("weight", QKV, (16, 3), 0, (0, 1)),  # the first KV head's keys
        Flip("moment2", QKV, (31, 0), 2, (2, 3)),  # the second one's values
        Flip("weight", QKV, (3, 3), 0),  # queries, which nobody else has
    ]),
    ("dp=2,tp=2,zero=1", {"kv_heads": 1}, {}, [
        Flip("weight", QKV, (16, 3), 3, (3,), (0, 1, 2)),  # the one KV head's keys
        Flip("weight", QKV, (8, 3), 3, (1, 3)),  # queries of a tensor rank
        Flip("weight", NORM, (3,), 0, (0,), (1, 2, 3)),
    ]),
    ("tp=2x2", {}, {}, [
        Flip("weight", NORM, (3,), 2, (0, 2)),
        Flip("moment1", NORM, (15,), 1, (1, 3)),
        Flip("weight", DOWN, (3, 0), 0),
    ]),
    ("dp=2,pp=2", {}, {}, [  # tied
        Flip("weight", EMBEDDING, (7, 7), 3, (3,), (0, 1, 2)),
        Flip("moment1", EMBEDDING, (7, 7), 0, (0,), (1, 2, 3)),
        Flip("weight", NORM, (0,), 1, (0, 1)),
        Flip("weight", "blocks.1.mlp_norm.weight", (0,), 2, (2, 3)),
    ]),
    ("pp=2,zero=2,dp=2", {}, {}, [Flip("weight", EMBEDDING, (7, 7), 2, (2,), (0, 1, 3))]),
    ("pp=2", {}, {}, [Flip("weight", EMBEDDING, (60, 0), 1, (0, 1)), Flip("weight", NORM, (0,), 0)]),
    ("pp=2,schedule=dualpipe", UNTIED, {}, [
        Flip("weight", DOWN, (3, 0), 0, (0, 1)),
        Flip("moment2", "head.weight", (3, 0), 1, (0, 1)),
    ]),
    ("pp=2,schedule=pipedream,dp=3", UNTIED, {"batch": 12, "clip": 0.0}, [
        Flip("weight", NORM, (0,), 1, (1,), (0, 2)),
        Flip("moment1", "blocks.1.mlp_norm.weight", (0,), 4, (4,), (3, 5)),
    ]),
    ("pp=2,schedule=pipedream-2bw,dp=2,zero=1", UNTIED, {"clip": 0.0}, [
        Flip("weight", "head.weight", (0, 0), 2, (2, 3)),
    ]),
    ("cp=2", {}, {}, [Flip("weight", QKV, (31, 15), 0, (0, 1))]),
    ("dp=4,ep=2", MOE, {}, [
        Flip("weight", "blocks.1.mlp.experts.gate_up", (0, 0, 0), 2, (0, 2)),
        Flip("weight", "blocks.1.mlp.experts.down", (3, 0, 0), 1, (1, 3)),
        Flip("moment1", "blocks.0.mlp.experts.gate_up", (3, 15, 0), 3, (1, 3)),
        Flip("weight", "blocks.1.mlp.router.weight", (3, 0), 3, (3,), (0, 1, 2)),
        Flip("buffer", "blocks.1.mlp.router.bias", (2,), 2, (2,), (0, 1, 3)),
    ]),
    ("dp=4,ep=2,zero=1,hsdp=2", MOE, {}, [
        Flip("weight", "blocks.1.mlp.experts.down", (3, 0, 0), 1, (1, 3)),
        Flip("moment1", "blocks.0.mlp.experts.gate_up", (0, 0, 0), 2, (0, 2)),
        Flip("moment2", EMBEDDING, (60, 15), 3, (1, 3)),  # in a shard of its replica's two ranks
    ]),
    ("dp=8,ep=2,zero=3,hsdp=2", MOE, {}, [
        Flip("weight", "blocks.0.mlp.experts.gate_up", (0, 0, 0), 4, (0, 4)),
        Flip("weight", "blocks.0.mlp.experts.down", (3, 15, 7), 3, (3, 7)),  # the last of the second shard
    ]),
    ("dp=2,tp=2,ep=2", MOE, {}, [
        Flip("weight", "blocks.1.mlp.experts.gate_up", (0, 0, 0), 2, (0, 2)),
        Flip("buffer", "blocks.1.mlp.router.bias", (0,), 0, (0,), (1, 2, 3)),
    ]),
    ("dp=2,ep=2,zero=2,pp=2", MOE, {}, [Flip("buffer", "blocks.1.mlp.router.bias", (0,), 3, (2, 3))]),
    ("tp=2,sp,pp=2", {}, {}, [
        Flip("weight", NORM, (0,), 1, (0, 1)),
        Flip("weight", EMBEDDING, (0, 0), 2, (0, 2)),  # tied, and cut by token
    ]),
]  # fmt: skip


@dataclass
class Seen:
    """What a rank of a case saw: messages of the checks after each flip, and its own part of everything."""

    clean: list
    said: list
    sent: list
    parts: list


def train_and_flip(rank, world, job, flips, steps=3):
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger()) if world > 1 else World.single()
    trainer = Trainer(job, here, MadeUpBatches(job, mesh.coordinates(rank)["dp"]))
    consistency = Consistency(trainer)
    clean = []
    for step in range(steps):
        trainer.step(step)
        clean.append(message(consistency, step + 1))
    sent = [transfer for transfer in here.ledger.transfers() if transfer.phase == "check"]
    said = []
    for flip in flips:
        if flip.rank == rank:
            turn(trainer, flip)
        said.append(message(consistency, steps))
        if flip.rank == rank:
            turn(trainer, flip)
    clean.append(message(consistency, steps))
    parts = [(part.name, part.offsets, tuple(part.tensor.shape)) for part in parts_of(trainer)]
    here.close()
    return Seen(clean, said, sent, parts)


def message(consistency, step):
    try:
        consistency.check(step)
    except ReplicasDiffer as differ:
        return str(differ)
    return None


def turn(trainer, flip):
    """Flips the bit, found where a checkpoint would find the element, or in the module's own parameter."""
    if flip.kind == "weight" and (trainer.job.layout.zero < 3 or trainer.job.train.dtype == "bfloat16"):
        tensor = dict(trainer.model.named_parameters())[flip.name].detach()
        piece = next(piece for piece in trainer.pieces if piece.parameter.name == flip.name)
        whole = np.full(piece.parameter.shape, -1)
        piece.put(np.arange(tensor.numel()).reshape(piece.shape), whole)
        assert whole[flip.index] >= 0, "the rank does not hold it"
        tensor, index = tensor.view(-1), (int(whole[flip.index]),)
    else:
        wanted = f"{flip.kind.replace('master', 'weight')}/{flip.name}"
        tensor, index = next(
            (part.tensor.detach(), tuple(np.subtract(flip.index, part.offsets)))
            for part in parts_of(trainer)
            if part.name == wanted and inside(flip.index, part.offsets, part.tensor.shape)
        )
    bits = tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
    bits[index] ^= torch.tensor(1, dtype=bits.dtype) << min(flip.bit, bits.element_size() * 8 - 1)


def inside(index, offsets, sizes):
    return all(offset <= at < offset + size for at, offset, size in zip(index, offsets, sizes, strict=True))


def ranks_in_words(ranks):
    words = [str(rank) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


@pytest.mark.parametrize(
    ("layout", "model", "train", "flips"), CASES, ids=[" ".join((layout, *train)) for layout, _, train, _ in CASES]
)
def test_a_flipped_bit_is_named_and_a_clean_run_passes(pool, tmp_path, layout, model, train, flips):
    job = small(layout, tmp_path, {"layers": 2, **model}, **{"check_every": 1, **train})
    seen = pool.run(train_and_flip, job.layout.world, job, flips)
    for of_rank in seen:
        assert of_rank.clean == [None] * 4, "the same bits everywhere, before and after"
        assert of_rank.said == seen[0].said, "every rank says the same"
    for flip, said in zip(flips, seen[0].said, strict=True):
        if not flip.named:
            assert said is None, "nobody else holds it"
            continue
        named = ranks_in_words(flip.named)
        expected = f" differs between {named}, of which none has the most on its side;"
        if flip.others:
            expected = f" on {named} differs from that on {ranks_in_words(flip.others)};"
        assert said.startswith(f"after 3 steps {flip.name} ("), said
        assert expected in said and said.endswith(
            "all were equal after 3 steps, so a checkpoint up to there would do"
        ), said
    rows = audit([[*check_transfers(job, rank)] * 3 for rank in range(job.layout.world)], [rank.sent for rank in seen])
    assert [row.difference() for row in rows if not row.ok] == []
    assert sum(map(sum, (row.measured_sent for row in rows))) > 0
    holders_are_known(job, [rank.parts for rank in seen])


def holders_are_known(job, parts):
    """Every element of every state that several ranks keep, as their checkpoints show, is compared among all of these."""
    holders = defaultdict(lambda: defaultdict(set))  # by kind and name, by element
    for rank, of_rank in enumerate(parts):
        for name, offsets, sizes in of_rank:
            for index in np.ndindex(*sizes):
                holders[name][tuple(np.add(index, offsets).tolist())].add(rank)
    groups = defaultdict(dict)
    for rank in range(job.layout.world):
        pieces = {piece.parameter.name: piece for piece in pieces_of(job, rank)}
        for axes, copies in copies_of(job, rank).items():
            for copy in copies:
                if copy.name in pieces:
                    piece = pieces[copy.name]
                    whole = np.full(piece.parameter.shape, -1)
                    piece.put(np.arange(np.prod(piece.shape)).reshape(piece.shape), whole)
                    elements = np.argwhere((copy.start <= whole) & (whole < copy.stop))
                else:
                    elements = np.arange(copy.start, copy.stop)[:, None]
                for index in map(tuple, elements.tolist()):
                    groups[rank, f"{copy.kind}/{copy.name}"][index] = set(mesh_of(job).group(axes, rank))
    for name, elements in holders.items():
        if name.startswith(
            "weight/"
        ):  # whole ones, where ZeRO hands them around, are held by more ranks than shards are
            continue
        for index, ranks in elements.items():
            for rank in ranks:
                assert groups[rank, name].get(index, {rank}) == ranks, (name, index, rank)


def test_the_hash_is_what_it_says():
    """SplitMix64 over the bits, in whole numbers of Python's, on both sides of a chunk's edge."""

    def mixed(bits, place):
        x = (bits + place * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    random = np.random.default_rng(0)
    for dtype, bits in ((np.float64, np.int64), (np.float32, np.int32)):
        values = random.normal(size=37).astype(dtype)
        expected = sum(mixed(int(x), place) for place, x in enumerate(values.view(bits))) % 2**64
        assert int(hash_bits(torch.from_numpy(values))) % 2**64 == expected
    long = torch.zeros(CHUNK + 2)
    before = int(hash_bits(long))
    long[CHUNK + 1] = torch.tensor(1, dtype=torch.int32).view(torch.float32)
    assert (int(hash_bits(long)) - before) % 2**64 == (mixed(1, CHUNK + 1) - mixed(0, CHUNK + 1)) % 2**64
    assert int(hash_bits(torch.empty(0))) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_bit_and_every_swap_changes_the_hash(dtype):
    values = torch.linspace(-3, 5, 20, dtype=torch.float64).to(dtype)
    bits = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()])
    seen = {int(hash_bits(values))}
    changes = 0
    for place in range(len(values)):
        for bit in range(bits.element_size() * 8):
            changed = bits.clone()
            changed[place] ^= torch.tensor(1, dtype=bits.dtype) << bit
            seen.add(int(hash_bits(changed.view(dtype))))
            changes += 1
        for other in range(place):
            swapped, signs = values.clone(), values.clone()
            swapped[[place, other]] = swapped[[other, place]]
            signs[[place, other]] *= -1
            seen |= {int(hash_bits(swapped)), int(hash_bits(signs))}
            changes += 2
    assert len(seen) == changes + 1


def test_zeros_and_nans_count_as_their_bits():
    def hashed(*bits):
        return int(hash_bits(torch.tensor(bits, dtype=torch.int64).view(torch.float64)))

    zero, negative, nan, other = 0, -(2**63), 0x7FF8 << 48, (0x7FF8 << 48) + 1
    assert len({hashed(1, bits) for bits in (zero, negative, nan, other)}) == 4
    assert hashed(1, nan) == hashed(1, nan)


def test_hashing_changes_nothing():
    for dtype in (torch.float64, torch.float32):
        values = torch.linspace(-3, 5, 20, dtype=dtype)
        before = values.clone()
        hash_bits(values)
        assert torch.equal(values, before)


def test_who_is_at_fault():
    assert minority((0, 1), (5, 6)) == (0, 1)
    assert minority((0, 2, 4), (5, 6, 5)) == (2,)
    assert minority((0, 1, 2, 3), (5, 6, 5, 6)) == (0, 1, 2, 3)
    assert minority((0, 1, 2, 3), (5, 6, 5, 7)) == (1, 3)
    assert minority((0, 1, 2), (5, 6, 7)) == (0, 1, 2)


def whole_run(rank, world, job, tokens, at):
    """shoal train's loop; rank 1's weights change after step `at`, when it is given."""
    step = Trainer.step

    def flipping(trainer, number, *more):
        result = step(trainer, number, *more)
        if rank == 1 and number == at:
            with torch.no_grad():
                dict(trainer.model.named_parameters())[NORM][0] += 1e-9
        return result

    Trainer.step = flipping
    try:
        here = World(mesh_of(job), rank, Ledger())
        summary = loop.run(job, here, tokens, io.StringIO())
        rows = audit([summary.predicted], [summary.measured])
        return [(row.phase, sum(row.measured_calls), row.ok) for row in rows]
    except ReplicasDiffer as differ:
        return str(differ)
    finally:
        Trainer.step = step


def test_a_run_checks_now_and_then_and_at_its_end(pool, tmp_path):
    tokens = tmp_path / "made.tokens"
    with TokenWriter(tokens, 61, "bytes") as writer:
        for _ in range(40):
            writer.add(np.random.default_rng(0).integers(0, 61, 100))
    job = small("dp=3", tmp_path / "run", batch=6, check_every=4, save_every=1, sample=0, eval_batches=1)
    seen = pool.run(whole_run, 3, job, tokens, None)
    for rows in seen:
        assert [calls for phase, calls, _ in rows if phase == "check"] == [2, 2], "after 4 steps and after 6"
        assert all(ok for _, _, ok in rows)
    unchecked = replace(job, train=replace(job.train, check_every=0))
    assert not any(phase == "check" for phase, _, _ in pool.run(whole_run, 3, unchecked, tokens, 2)[0])
    seen = pool.run(whole_run, 3, job, tokens, 4)
    assert len(set(seen)) == 1
    assert seen[0].startswith(f"after 6 steps {NORM} (weights) on rank 1 differs from that on ranks 0 and 2;")
    assert "equal after 4 steps" in seen[0]
    steps = [int(folder.name[5:]) for folder in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(steps) == 5, "what is wrong is not saved by the step that finds it"


def raises():
    raise ReplicasDiffer("after 3 steps a.weight (weights) differs between ranks 0 and 1")


def test_it_ends_the_command_with_one_line(monkeypatch, tmp_path, capsys):
    with pytest.raises(ReplicasDiffer, match="after 3 steps"):
        run_local(raises, 2)
    monkeypatch.setattr("shoal.cli.train.train_rank", lambda *given: raises())
    words = ["train", "--model", "tiny", "--data.cache", str(tmp_path), "--out", str(tmp_path / "run")]
    capsys.readouterr()
    assert main([*words, "--train.check_every", "3"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "shoal: after 3 steps a.weight (weights) differs between ranks 0 and 1"
    )
