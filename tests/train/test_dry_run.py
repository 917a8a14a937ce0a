"""The dry run: one rank's step without the other ranks and without values does what that rank does in a real run."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.cli.main import main
from shoal.comm.ledger import Ledger
from shoal.comm.rehearsal import rehearsed
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.plan.pieces import mesh_of
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.inventory import flops_per_token
from shoal.spec.layout import Layout, layout_tree
from shoal.train.trainer import Trainer
from shoal.verify.known import evenly
from shoal.verify.matrix import DEEPSEEK
from shoal.verify.measure import measured_step
from shoal.verify.rehearsal import WithoutValues, rehearse
from shoal.verify.trial import MadeUpBatches
from shoal.verify.verify import small_job

LAYOUTS = [
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,sp,zero=1,recompute=selective",
    "dp=4,zero=3,hsdp=2",
    "dp=2,zero=2,cp=2,cp_kind=zigzag",
    "tp=2x2,dp=2,recompute=full",
    "cp=4,cp_kind=hybrid,ulysses=2,tp=2",
    "pp=2,schedule=zb-v,dp=2,zero=3",
    "pp=4,schedule=dualpipe",
    "pp=2,schedule=pipedream,dp=2,zero=1",
]


def job(layout, model="tiny", **train):
    tree = {"model": {"preset": model} if isinstance(model, str) else model, "layout": layout_tree(layout)}
    small = small_job(job_from_tree(tree))
    return replace(small, train=replace(small.train, dtype="float32", **train))


def really(rank, world, jobs):
    """(transfers of a step, the most bytes held) of each job on a rank that is one of a real group."""
    results = []
    for this in jobs:
        mesh = mesh_of(this)
        here = World(mesh, rank, Ledger())
        trainer = Trainer(this, here, MadeUpBatches(this, mesh.coordinate("dp", rank), whole=True))
        trainer.step(0)
        here.ledger.clear()
        held = measured_step(trainer, 1)
        results.append((here.ledger.transfers(), held))
        here.close()
    return results


@pytest.mark.parametrize("world", [4, 8])
def test_every_rank_of_a_dry_run_does_what_it_does_in_a_real_run(pool, world):
    jobs = [this for this in map(job, LAYOUTS) if this.layout.world == world]
    for rank, results in enumerate(pool.run(really, world, jobs)):
        for this, (transfers, held) in zip(jobs, results, strict=True):
            dry = rehearse(this, rank)
            assert dry.failures == [], f"{this.layout}, rank {rank}"
            assert Counter(dry.transfers) == Counter(transfers), f"{this.layout}, rank {rank}: place by place"
            assert {row.category: row.measured for row in dry.memory} == held, f"{this.layout}, rank {rank}"


@pytest.mark.parametrize("model", ["gpt2", "mistral-7b", "qwen3-0.6b"])
def test_every_kind_of_model(model):
    for layout in ("tp=2,sp", "pp=2,recompute=full"):
        this = job(layout, model)
        this = replace(this, model=replace(this.model, dropout=0.1))
        for dtype in ("float32", "bfloat16"):
            for rank in range(2):
                assert rehearse(replace(this, train=replace(this.train, dtype=dtype)), rank).failures == []


WITH_EXPERTS = [
    "dp=4,ep=4",
    "dp=2,tp=4,ep=2,zero=3,hsdp=2",
    "dp=2,ep=2,tp=2,etp=2,sp,zero=3,recompute=full",
    "tp=2,cp=2,ep=4,dedup,recompute=selective",
    "dp=4,ep=4,pp=2,schedule=zb-h1,dedup,micro_batches=3",
    "dp=2,tp=2,pp=2,ep=4,sp,zero=2,schedule=interleaved,v=2",
    "tp=4,etp=4,pp=2,schedule=dualpipe",
]
EXPERTS = {  # the second with a dense layer before
    "plain": {"experts": 8, "top_k": 3, "expert_ffn": 32, "z_loss": 0.01},
    "deepseek": DEEPSEEK["model"]["moe"] | {"experts": 8, "top_k": 2, "shared_gate": True, "aux_loss": 0.01},
}


def really_evenly(rank, world, jobs):
    """`really`, with routers that choose as a dry run takes them to."""
    topk = torch.Tensor.topk

    def even(x, k, dim=-1):
        assert dim == -1
        chosen = topk(x, k, dim)
        return type(chosen)((chosen.values, evenly(chosen.indices.shape, x.shape[-1])))

    torch.Tensor.topk = even
    try:
        return really(rank, world, jobs)
    finally:
        torch.Tensor.topk = topk


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_do_in_a_dry_run_what_they_do_in_a_real_one_with_even_routing(pool, kind, world):
    models = {"preset": "moe-tiny", "moe": EXPERTS[kind]}
    jobs = [this for this in (job(layout, models) for layout in WITH_EXPERTS) if this.layout.world == world]
    rank = world - 2
    for this, (transfers, held) in zip(jobs, pool.run(really_evenly, world, jobs)[rank], strict=True):
        dry = rehearse(this, rank)
        assert dry.failures == [], this.layout
        assert Counter(dry.transfers) == Counter(transfers), f"{this.layout}: place by place"
        assert {row.category: row.measured for row in dry.memory} == held, this.layout


@pytest.mark.parametrize("layout", ["tp=3", "tp=3,etp=3", "pp=2,schedule=pipedream"])
def test_experts_of_ranks_that_tokens_are_not_shared_out_to_evenly(layout):
    this = job(layout, {"preset": "moe-tiny", "moe": EXPERTS["plain"]})
    for rank in range(this.layout.world):
        assert rehearse(this, rank).failures == []


@pytest.mark.parametrize("layout", ["dp=4,ep=4,dedup", "tp=2,cp=2,ep=2,sp"])
def test_what_experts_drop_for_want_of_capacity(layout):
    """Which rank's tokens are dropped depends on those of others, so ranks differ in a real run."""
    drops = {"experts": 8, "top_k": 2, "expert_ffn": 32, "capacity": 0.75, "balance": "micro_batch"}
    this, full = (job(layout, {"preset": "moe-tiny", "moe": drops | {"capacity": c}}) for c in (0.75, 0.0))
    dry = rehearse(this, 1)
    assert dry.failures == [] and 0.7 < dry.flops["products"][1] / rehearse(full, 1).flops["products"][1] < 0.95


def test_a_rank_of_a_large_mixture_of_experts():
    """DeepSeek-V3's sizes over 512 ranks, by hand: 58 layers of 256 experts, of which a rank has four of each of two stages."""
    moe = DEEPSEEK["model"]["moe"] | {"experts": 256, "top_k": 8, "groups": 8, "groups_kept": 4, "expert_ffn": 2048}
    h = 7168
    model = {"layers": 8, "hidden": h, "heads": 128, "kv_heads": 128, "head_size": 128, "ffn": 18432, "vocab": 129280,
             "positions_max": 4096, "moe": moe | {"first_dense": 3}}  # fmt: skip
    tree = {
        "model": model,
        "layout": layout_tree("dp=128,pp=4,ep=64,zero=1,dedup,micro_batches=4"),
        "train": {"batch": 512, "dtype": "bfloat16"},
        "data": {"sequence": 4096},
    }
    dry = rehearse(job_from_tree(tree), 511)
    assert dry.failures == [] and all(row.predicted == row.measured for row in dry.memory)
    held = {row.category: row.measured for row in dry.memory}
    experts, shared = 4 * 3 * h * 2048, 3 * h * 2048
    layer = 4 * h * 128 * 128 + experts + shared + 256 * h + 2 * h
    assert held["weights"] == 2 * (2 * layer + 129280 * h + h)
    # A token goes to eight experts a group apart, so to eight ranks: seven in eight of its rows, and of 64 ranks one is its own.
    rows = 4 * 4096 * 8 * 63 // 64
    (forward,) = (sum(t.sent for t in dry.transfers if (t.phase, t.axis) == ("forward", "ep") and t.layer == 6),)
    counts, weights, places = 4 * 63 * 5 * 8, rows * 4, rows * 4
    assert forward == rows * h * 2 * 2 + counts + weights + places


def test_flops_of_all_ranks_are_those_of_the_model():
    """Beside recomputation, and but for the diagonal: a token sees (s + 1) / 2 keys, of which utilisation counts s / 2."""
    this = job("dp=2,tp=2,pp=2,zero=1")
    ranks = [rehearse(this, rank).flops for rank in range(8)]
    assert all(planned == seen for flops in ranks for planned, seen in flops.values())
    tokens, s = this.train.batch * this.data.sequence, this.data.sequence
    model = this.model
    attention = 12 * model.layers * model.heads * model.head_size * tokens
    assert sum(flops["attention"][1] for flops in ranks) == attention * (s + 1) / 2
    products = flops_per_token(model, s) * tokens - attention * s / 2
    assert sum(flops["products"][1] for flops in ranks) == pytest.approx(products, rel=1e-12)


def test_a_rank_of_many_thousands():
    """The layout of a 405B model over 16,384 ranks; in four micro-batches of 32, the rest being more of the same."""
    tree = {
        "model": {"preset": "llama3.1-405b"},
        "layout": layout_tree("tp=8,sp,pp=16,dp=128,zero=1,micro_batches=4"),
        "train": {"batch": 512, "dtype": "bfloat16"},
        "data": {"sequence": 8192},
    }
    dry = rehearse(job_from_tree(tree), 1234)
    assert dry.failures == [] and dry.coordinates == {"tp": 2, "cp": 0, "dp": 26, "pp": 1}
    held = {row.category: (row.predicted, row.measured) for row in dry.memory}
    assert all(planned == seen for planned, seen in held.values())
    # By hand: eight layers of 3.19e9 parameters on eight ranks; AdamW's 12 bytes per parameter over 128 ranks.
    h, ffn, kv = 16384, 53248, 1024
    parameters = 8 * ((2 * h * h + 2 * kv * h + 3 * h * ffn) // 8 + 2 * h)
    assert held["weights"] == (2 * parameters, 2 * parameters)
    assert held["optimizer"][0] == pytest.approx(12 * parameters / 128, rel=1e-3)
    counted = sum(seen for _, seen in held.values())
    assert counted < dry.most < 1.1 * counted, "what is not counted is little"


@pytest.mark.parametrize("broken", ["transfers", "memory", "flops"])
def test_what_is_not_as_planned_fails(monkeypatch, broken):
    this = job("tp=2,dp=2")
    if broken == "transfers":
        monkeypatch.setattr("shoal.axes.shares.Shares.sum", lambda self: None)
        this = replace(this, layout=Layout.parse("tp=2,dp=2,sp"))
        expected = "backward all_reduce over tp: rank 0 planned"
    elif broken == "memory":
        saved = torch.autograd.function.FunctionCtx.save_for_backward
        monkeypatch.setattr(
            "shoal.kernels.swiglu._SwiGLU.forward", lambda ctx, x: (saved(ctx, x.exp(), x), x.chunk(2, -1)[0] * 1)[1]
        )
        monkeypatch.setattr("shoal.kernels.swiglu._SwiGLU.backward", lambda ctx, g: torch.cat((g, g), -1))
        expected = "memory, activations: rank 0 planned"
    else:
        monkeypatch.setattr("shoal.kernels.linear._ONEDNN", False)
        monkeypatch.setattr(
            torch.nn.functional, "linear", lambda x, weight, bias=None: x @ weight.t() + 0 * (x @ weight.t())
        )
        expected = "products: planned"
    failures = rehearse(this, 0).failures
    assert any(line.startswith(expected) for line in failures), failures


def test_what_a_dry_run_cannot_do_is_refused(tmp_path):
    for layout, changes, field in (
        ("dp=2", {"train": {"offload": "disk"}}, "train.offload"),
        ("cp=2", {"data": {"packing": "packed", "sequence": 64}}, "data.packing"),
    ):
        tree = {"model": {"preset": "tiny"}, "layout": layout_tree(layout), **changes}
        with pytest.raises(RequestError) as refused:
            rehearse(job_from_tree(tree), 0)
        assert refused.value.field == field and "would do" in str(refused.value)
    with pytest.raises(RequestError, match="0 to 3 would do"):
        rehearse(job("dp=4"), 4)


def test_values_are_asked_for_in_vain():
    with FakeTensorMode(), WithoutValues() as seen:
        x = torch.rand(6, 3)
        before = seen.now
        assert float(x.sum()) == 1.0 and int((x > 0).sum()) == 1 and bool(torch.isfinite(x.sum()))
        assert (x > 0).nonzero().shape == (18, 2)
        seen.begin([x])
        x.untyped_storage().resize_(0)
        torch.empty(5)
        assert seen.most == before, "what was given back makes room"
        x.untyped_storage().resize_(72)
        x.view(-1)
        y = torch.empty(5)
        assert seen.most == seen.now == 72 + y.nbytes


def test_only_the_ranks_own_groups_are_made():
    mesh = Mesh({"tp": 8, "dp": 128, "pp": 16}, ("tp", "dp", "pp"))
    with rehearsed(mesh, 1234) as world:
        group = world.group("dp")
        assert group.size == 128 and group.ranks[group.index] == 1234
        assert torch.distributed.get_world_size(group.process_group) == 128
        assert torch.distributed.get_rank(group.process_group) == group.index
    assert not torch.distributed.is_initialized()


def test_the_command(capsys):
    asked = ["train", "--dry-run", "--layout", "dp=2,tp=2", "--model", "tiny"]
    assert main([*asked, "--rank", "3", "--world", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["rank"] == 3 and document["world"] == 4
    assert {row["category"] for row in document["memory"]} >= {"weights", "gradients", "optimizer", "activations"}
    assert all(row["predicted_bytes"] == row["measured_bytes"] for row in document["memory"])
    assert {row["kind"] for row in document["flops"]} == {"products", "attention"}
    assert main([*asked]) == 0
    assert "rank 0 of 4" in (shown := capsys.readouterr().out) and "ok: as planned" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dry-run --rank 4", "0 to 3 would do"),
        ("--dry-run --rank first", "--rank 0 would do"),
        ("--dry-run --world 8", "dp=4 would do"),
        ("--dry-run --world 7", "--world 4 would do"),
        ("--rank 1", "--dry-run --rank 1 would do"),
    ],
)
def test_bad_input_is_one_line(capsys, words, said):
    assert main(["train", "--layout", "dp=2,tp=2", "--model", "tiny", *words.split()]) == 2
    said_at_all = capsys.readouterr().err.strip()
    assert said in said_at_all and len(said_at_all.splitlines()) == 1
