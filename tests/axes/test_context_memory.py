"""Activations under context parallelism: to the byte what the closed form says, 1/N of one process, and within a limit."""

import resource
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from reference import GPT, LLAMA
from shoal.axes.context.cost import Crossing, saved_bytes
from shoal.axes.tensor.run import TensorLayers
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.launch.pool import Pool
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.rope import rotation
from shoal.plan.activations import block_bytes
from shoal.plan.pieces import mesh_of
from shoal.spec.build import job_from_tree
from shoal.spec.job import Job
from shoal.spec.layout import Layout
from shoal.train.layers import crossing_of
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches

BATCH, SEQUENCE = 2, 64
MODELS = {
    "llama": LLAMA,
    "GQA": replace(LLAMA, kv_heads=4),
    "MQA, window": replace(LLAMA, kv_heads=1, window=5),
    "qk_norm": replace(LLAMA, qk_norm=True, dropout=0.1),
    "gpt": GPT,
    "gpt, qk_norm, GQA": replace(GPT, qk_norm=True, kv_heads=2),
}
KINDS = ("ring", "zigzag", "striped", "allgather", "ulysses")


def kept(rank, world, cases):
    """Per case (model, layout, whether there are documents): bytes of the storages that autograd keeps of one block."""
    torch.set_num_threads(1)
    found = []
    for model, layout, documents in cases:
        job = Job(model, Layout.parse(layout))
        here = World(mesh_of(job), rank, Ledger()) if world > 1 else World.single()
        layers = TensorLayers(model, here.group("tp"), job.layout.sp)
        crossing = crossing_of(job, here)
        numbers = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE) // 7 if documents else None
        if crossing is None:
            seen = visible(SEQUENCE, model.window, numbers, here.device)
        else:
            seen = crossing.view(SEQUENCE, window=model.window, documents=numbers)
        found.append(of_block(model, layers, crossing, seen, SEQUENCE // job.layout.cp))
        here.close()
    return found


def of_block(model, layers, crossing, seen, tokens):
    block = Block(model, layers, crossing)
    x = torch.zeros(layers.residual(BATCH, tokens)).requires_grad_()
    turn = None
    if model.positions == "rope":
        turn = rotation(model.rope, model.head_size, torch.arange(tokens)[None], torch.float32)
    key = layers.noise_key(DropoutKey(1, 0, torch.arange(BATCH), torch.arange(tokens)))
    noise = key.noise(2, model.hidden) if model.dropout else None
    mask = [seen] if torch.is_tensor(seen) else []
    others = {x.untyped_storage()._cdata for x in (*block.parameters(), *(turn or ()), *(noise or ()), *mask)}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, turn, seen, noise)
    return sum(size for place, size in storages.items() if place not in others)


def planned(model, layout, documents):
    data = {"sequence": SEQUENCE, "packing": "packed" if documents else "stream"}
    asked = job_from_tree({"layout": layout, "data": data, "train": {"batch": BATCH}})
    return block_bytes(replace(asked, model=model), "none").kept


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["cp=2", "cp=2,cp_kind=ulysses"]),
        (4, [f"cp=4,cp_kind={kind}" for kind in KINDS] + ["cp=4,ulysses=2", "cp=2,tp=2,sp,cp_kind=ulysses"]),
        (8, ["cp=8", "cp=8,cp_kind=ulysses", "cp=8,ulysses=4", "cp=4,tp=2,sp"]),
    ],
)
def test_the_closed_form_is_what_autograd_keeps(pool, world, layouts):
    """Every kind of block and crossing; no mask is kept, of documents or of a window."""
    cases = [
        (model, layout, (number + place) % 2 == 0)
        for place, layout in enumerate(layouts)
        for number, model in enumerate(MODELS.values())
    ]
    for rank, found in enumerate(pool.run(kept, world, cases)):
        for case, size in zip(cases, found, strict=True):
            assert size == planned(*case), (rank, case)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_keeps_falls_as_one_over_n(pool, kind):
    """Measured alone: all of a causal block's activations, its masks of dropout included."""
    for model in (MODELS["qk_norm"], GPT):
        sizes = {n: pool.run(kept, n, [(model, f"cp={n},cp_kind={kind}", False)]) for n in (1, 2, 4, 8)}
        assert all(len({size for (size,) in ranks}) == 1 for ranks in sizes.values())
        of_rank = {n: ranks[0][0] for n, ranks in sizes.items()}
        assert 4 * of_rank[8] == 2 * of_rank[4] == of_rank[2]
        if kind != "ulysses":  # which keeps its output twice when there is anybody to send it to
            assert 2 * of_rank[2] == of_rank[1]


def test_attention_s_part_of_it_by_hand():
    """On 4 ranks 32 tokens each: queries, keys, values, output and log-sum-exp, of the block's whole."""
    cut = Crossing("zigzag", 4, BATCH, SEQUENCE, 8, 8, 4)
    assert saved_bytes(cut) == 32 * (4 * 8 * 4 + 8) * 4
    without = replace(GPT, dropout=0.0)
    rest = (
        32 * (2 * 32 + 2 * 2 + 2 * 32 + 2 * 128) * 4
    )  # inputs of norms, their statistics, inputs of column layers, MLP
    assert planned(without, "cp=4", False) == rest + saved_bytes(cut)
    assert planned(without, "dp=1", False) == 4 * (rest + saved_bytes(cut))


LONG, LIMIT = 4096, 230 * 2**20  # tokens; bytes beyond what a process has before its first step


def long_job(layout, sequence=LONG):
    """Small in everything but its length: a block keeps 19 MB of 4096 tokens."""
    model = {"layers": 16, "hidden": 64, "heads": 4, "positions_max": LONG}
    data, train = {"sequence": sequence}, {"batch": 1, "warmup": 0}
    return job_from_tree({"layout": layout, "model": model, "data": data, "train": train})


def within(rank, world, job, allowance):
    """The loss after a step of training; or what the system said when it gave no memory. allowance: bytes, 0 for any."""
    torch.set_num_threads(1)
    here = World(mesh_of(job), rank, Ledger()) if world > 1 else World.single()
    trainer = Trainer(job, here, MadeUpBatches(job, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if allowance:
        resource.setrlimit(resource.RLIMIT_DATA, (private_memory() + allowance, hard))
    try:
        trainer.step(0)
        return trainer.step(1).loss
    except (RuntimeError, MemoryError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def private_memory():
    """Bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def limited(rank, world):
    """Whether the system refuses memory beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_memory() + 2**20, hard))
    try:
        torch.empty(2**26, dtype=torch.uint8)
    except RuntimeError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return False


def test_a_sequence_too_long_for_one_process_trains_on_four_within_the_same_limit_each():
    """One process needs some 380 MiB, each of four some 140, of 230. The processes are fresh, so none has any put by."""
    with Pool(4) as fresh:
        if not fresh.run(limited, 1)[0]:
            pytest.skip("this system does not hold processes to RLIMIT_DATA")
        (refused,) = fresh.run(within, 1, long_job(""), LIMIT)
        assert isinstance(refused, str) and "memory" in refused, refused
        losses = fresh.run(within, 4, long_job("cp=4"), LIMIT)
        assert all(isinstance(loss, float) for loss in losses), losses
        (short,) = fresh.run(within, 1, long_job("", LONG // 4), LIMIT)
        assert isinstance(short, float), "it is the length that one process has no memory for"
        (unlimited,) = fresh.run(within, 1, long_job(""), 0)
        assert losses == [pytest.approx(unlimited, rel=1e-5)] * 4
