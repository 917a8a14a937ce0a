"""The most bytes of activations that a rank keeps: what autograd and put-off weight gradients really hold in a step."""

import functools
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import PutOff
from shoal.plan.activations import activation_bytes, block_bytes
from shoal.plan.pieces import mesh_of
from shoal.spec.build import job_from_tree
from shoal.spec.job import DataSpec, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches
from shoal.verify.verify import small_job, verify


def job(layout, preset="tiny", **data):
    tree = {"model": {"preset": preset}, "layout": layout, "data": data}
    if preset == "gpt2":
        tree["model"]["dropout"] = 0.1
    return small_job(job_from_tree(tree))


class Kept:
    """What is held for the backward of blocks: tensors that autograd keeps, and those that put-off gradients wait with."""

    def __init__(self):
        self.saved, self.queues, self.shared = weakref.WeakSet(), weakref.WeakSet(), set()
        self.counting, self.most = False, 0

    def pack(self, x):
        held = Held(x)
        if self.counting:
            self.saved.add(held)
        return held

    def sample(self, *_):
        tensors = [held.x for held in self.saved]
        tensors += [x for queue in self.queues for x in queue.inputs()]
        bytes_of = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        shared = {storage._cdata for storage in self.shared}
        self.most = max(self.most, sum(size for place, size in bytes_of.items() if place not in shared))


class Held:
    def __init__(self, x):
        self.x = x


@contextmanager
def sampled(kept, around, *instruction):
    with around(*instruction):
        kept.sample()
        yield
        kept.sample()


def most_kept(rank, world, job):
    """The most bytes over a step, as instructions end and when a block has been computed again."""
    here = World(mesh_of(job), rank, Ledger()) if world > 1 else World.single()
    trainer = Trainer(job, here, MadeUpBatches(job, here.mesh.coordinate("dp", rank)))
    kept = Kept()
    kept.shared = {p.untyped_storage() for p in trainer.model.parameters()}

    def enter(block, arguments):
        kept.shared |= {x.untyped_storage() for x in tree_leaves(arguments[1:]) if torch.is_tensor(x)}
        kept.counting = True

    def leave(*_):
        kept.counting = False
        kept.sample()

    for block in trainer.model.blocks.values():
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

        def again(*arguments, inside, **rest):
            before, kept.counting = kept.counting, True
            y = inside(*arguments, **rest)
            kept.sample()
            kept.counting = before
            return y

        block._inside = functools.partial(again, inside=block._inside)
    make = PutOff.__init__

    def noted(queue):
        make(queue)
        kept.queues.add(queue)

    if trainer.pipeline:
        engine = trainer.pipeline.engine
        kept.queues |= set(engine.queues.values())
        engine.around = functools.partial(sampled, kept, engine.around)
    PutOff.__init__ = noted  # of the queues that those are emptied into
    try:
        with saved_tensors_hooks(kept.pack, lambda held: held.x):
            trainer.step(0)
    finally:
        PutOff.__init__ = make
    here.close()
    return kept.most


LAYOUTS = [
    "dp=1", "recompute=selective", "recompute=full", "recompute=1", "zero=3,dp=2,recompute=full",
    "tp=2", "tp=2,recompute=selective", "tp=2,sp,recompute=selective", "tp=2,sp,regather,recompute=selective",
    "tp=2,sp,recompute=1", "tp=2x2,recompute=selective", "tp=2x2,recompute=full",
    "cp=2", "cp=2,recompute=selective", "cp=2,cp_kind=ulysses,recompute=selective", "cp=2,cp_kind=allgather,recompute=1",
    "pp=4,schedule=gpipe,recompute=full", "pp=3,recompute=1", "pp=2,schedule=interleaved,stages=1-3-2-2,recompute=2",
    "pp=2,schedule=pipedream,recompute=full", "pp=2,schedule=zb-h1", "pp=2,schedule=zb-h1,recompute=selective",
    "pp=2,schedule=zb-h2,recompute=full", "pp=2,tp=2,sp,schedule=zb-h1,recompute=1", "pp=2,schedule=dualpipe,recompute=full",
    "pp=2,schedule=dualpipe-v,recompute=selective", "pp=2,cp=2,schedule=zb-v,recompute=1",
    "pp=2,tp=2x2,schedule=zb-h1,recompute=1",
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_keeps_what_the_plan_says(pool, layout):
    asked = job(layout)
    asked = replace(asked, train=replace(asked.train, clip=0.0))
    kept = pool.run(most_kept, asked.layout.world, asked, timeout=60)
    assert kept == [activation_bytes(asked, rank) for rank in range(asked.layout.world)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["gpt2", "packed", "bfloat16"])
def test_kinds_of_models_and_data(pool, kind, recompute):
    """Dropout, LayerNorm and GELU; masks of documents; 16 bit."""
    asked = job(f"tp=2,recompute={recompute}", "gpt2") if kind == "gpt2" else job(f"tp=2,recompute={recompute}")
    if kind == "packed":
        asked = replace(asked, data=replace(asked.data, packing="packed"))
    if kind == "bfloat16":
        asked = replace(asked, train=replace(asked.train, dtype="bfloat16"))
    assert pool.run(most_kept, 2, asked, timeout=60) == [activation_bytes(asked, rank) for rank in range(2)]


def test_the_measure_tells_modes_apart(pool):
    """A plan for another mode is not what is measured."""
    for layout in ("dp=1", "pp=2,schedule=zb-h1"):
        asked = {mode: job(f"{layout},recompute={mode}") for mode in ("none", "selective", "full")}
        kept = {mode: pool.run(most_kept, each.layout.world, each) for mode, each in asked.items()}
        planned = {m: [activation_bytes(each, r) for r in range(each.layout.world)] for m, each in asked.items()}
        assert len(set(map(tuple, kept.values()))) == 3
        assert [m for m in asked for n in asked if kept[m] == planned[n]] == list(asked)


def test_the_published_bytes_of_a_block():
    """BG-5, 16 bit: 34 s b h / t with tp and sp but for the softmax, whose logarithms are 4 a s b / t; full 2 s b h / t."""
    for layout, t in (("dp=1", 1), ("tp=4,sp,regather", 4)):
        asked = Job(replace(gpt, qkv_bias=True), Layout.parse(layout), data=DataSpec(sequence=128), train=bfloat16)
        b, s, h, a = 2, 128, 64, 8
        norms = 4 * 2 * b * s  # mean and deviation of two norms, 2 bytes each
        assert block_bytes(asked, "none").kept == (34 * s * b * h + 4 * a * s * b + norms) // t
        assert block_bytes(asked, "full").kept == 2 * s * b * h // t


gpt = ModelSpec(
    layers=16, heads=8, hidden=64, ffn=256, vocab=61, norm="layernorm", positions="learned", mlp="gelu", dropout=0.1,
    output_bias=True, mlp_bias=True,
)  # fmt: skip
bfloat16 = TrainSpec(batch=2, dtype="bfloat16")


def test_a_pipeline_keeps_block_inputs_and_one_block():
    """PP-5 with one block computed again at a time: m L/p inputs and a block, where without there are m L/p blocks."""
    p, m, blocks = 4, 8, 16 // 4
    plain, again = (
        Job(gpt, Layout(pp=p, schedule="gpipe", micro_batches=m, recompute=mode), train=replace(bfloat16, batch=m))
        for mode in ("none", "full")
    )
    block = block_bytes(plain, "none")
    one_input = block_bytes(plain, "full").kept
    for rank in range(p):
        assert activation_bytes(plain, rank) == m * blocks * block.kept
        assert activation_bytes(again, rank) == m * blocks * one_input + block.kept - one_input
    assert activation_bytes(replace(plain, layout=replace(plain.layout, schedule="1f1b")), 1) == 3 * blocks * block.kept


@pytest.mark.parametrize("backwards", ["B0,I0.1,W0.1", "I0,W0,B0.1", "I0,B0.1,W0"])
def test_a_rank_may_split_the_backward_of_one_chunk_alone(pool, tmp_path, backwards):
    """What is put off waits in the chunks that have a W, and nowhere else; as measured, with blocks computed again."""
    (tmp_path / "mine.csv").write_text(
        "schedule,mine\nversions,flush\nroute,0.1,0.0,1.1,1.0\nmicro-batches,0\n" + f"rank,F0.1,F0,{backwards}\n" * 2
    )
    layout = {"pp": 2, "micro_batches": 1, "schedule": str(tmp_path / "mine.csv"), "recompute": "full"}
    verdict = verify(job(layout), pool=pool)
    assert verdict.failures == []
