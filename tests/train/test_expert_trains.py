"""Mixtures of experts through the trainer: against plain torch that goes token by token, byte for byte, and broken on purpose."""

import json
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest

from moe_training import plain_training
from reference import differing, together
from shoal.axes.expert import cost, dispatch
from shoal.axes.expert.run import MixtureOfExperts
from shoal.cli.main import main
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.launch.pool import Pool
from shoal.model import moe as riding
from shoal.plan import experts
from shoal.plan.experts import routed_transfers
from shoal.plan.pieces import mesh_of
from shoal.plan.traffic import evaluation_transfers, step_transfers
from shoal.spec.build import job_from_tree
from shoal.spec.fit import check_fit
from shoal.spec.layout import Layout
from shoal.train import experts as mixtures
from shoal.train import trainer
from shoal.train.experts import load_metrics
from shoal.train.trainer import Trainer
from shoal.train.weights import whole_weights
from shoal.verify.audit import audit
from shoal.verify.compare import compare
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import planned, verify

STEPS, BATCH, SEQUENCE = 5, 16, 6
GATED = {"shared_experts": 2, "shared_ffn": 5, "shared_gate": True}
MIXTURES = {
    "k=1": {"top_k": 1, "normalised": False, "aux_loss": 0.05, "layers": 1},
    "k=2": {"top_k": 2, "aux_loss": 0.05, "z_loss": 0.02, "router": "sigmoid", "bias": True, "bias_rate": 0.01, **GATED},
    "k=8": {"top_k": 8, "z_loss": 0.02, "first_dense": 1, "layers": 2},
    "drops": {"top_k": 2, "capacity": 0.75, "aux_loss": 0.05, "bias": True, "bias_rate": 0.01},
    "micro-batch": {"top_k": 2, "capacity": 0.75, "balance": "micro_batch", "aux_loss": 0.05, "layers": 1},
    "groups": {
        "top_k": 3, "groups": 4, "groups_kept": 2, "router": "sigmoid", "scaling": 2.5, "shared_experts": 1,
        "every": 2, "layers": 4, "aux_loss": 0.05,
    },
}  # fmt: skip


@cache
def asked(mixture, layout, **train):
    """A job of a few small blocks. Eight experts; the tensor axis cuts their width of 6, or fills 5 of shared ones up."""
    moe = {"experts": 8, "expert_ffn": 6, **MIXTURES[mixture]}
    model = {"layers": moe.pop("layers", 2), "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 37}
    job = job_from_tree(
        {
            "layout": layout,
            "model": {**model, "positions_max": 8, "moe": moe},
            "data": {"sequence": 8 if "cp" in layout or mixture == "drops" else SEQUENCE},
            "train": {
                "batch": BATCH, "dtype": "float64", "warmup": 2, "steps": STEPS, "learning_rate": 3e-3, "clip": 0.5,
                "bucket_mb": 0.005, **train,
            },
        }
    )  # fmt: skip
    check_fit(job.model, job.layout, job.sequence, BATCH)
    return job


TRUTHS = {}


def truth(job):
    """Five steps of plain torch. Of the layout only micro-batches can matter to it."""
    micro_batches = job.layout.micro_batches if job.model.moe.balance == "micro_batch" else 1
    key = job.model, job.data, micro_batches
    if key not in TRUTHS:
        TRUTHS[key] = plain_training(job, STEPS)
    return TRUTHS[key]


# Every number of expert ranks with every other axis; on 16 ranks what needs as many.
CASES = {
    2: [("k=2", "dp=2"), ("k=1", "ep=2"), ("k=8", "ep=2,zero=1"), ("drops", "tp=2,ep=2,micro_batches=2")],
    4: [
        ("drops", "dp=2,tp=2"),
        ("k=2", "dp=2,tp=2,etp=2,zero=2"),
        ("micro-batch", "dp=2,tp=2,sp,ep=2,micro_batches=2"),
        ("k=8", "dp=4,ep=4"),
        ("drops", "dp=2,cp=2"),
        ("k=2", "pp=2,dp=2"),
        ("groups", "pp=2,dp=2,schedule=interleaved"),
        ("k=2", "dp=4,ep=2,zero=3,micro_batches=2"),
        ("k=8", "dp=4,ep=2,dedup,order=tp-dp-ep-pp"),
        ("drops", "dp=2,cp=2,ep=2,zero=1"),
        ("k=8", "pp=2,dp=2,ep=2"),
        ("k=2", "dp=2,tp=2,ep=4,sp,dedup"),
        ("groups", "pp=2,ep=2,schedule=zb-v,zero=2"),
        ("k=2", "dp=4,ep=2,recompute=full"),
        ("k=2", "dp=4,ep=2,zero=3,hsdp=2,micro_batches=2"),
        ("drops", "dp=2,cp=2,ep=2,zero=2,hsdp=2"),
    ],
    8: [
        ("k=2", "dp=8,ep=8"),
        ("k=8", "dp=4,tp=2,ep=8,zero=1"),
        ("micro-batch", "dp=4,tp=2,sp,etp=2,ep=2,zero=3"),
        ("k=2", "dp=4,tp=2,etp=2,ep=4"),
        ("k=1", "dp=4,tp=2,ep=4,zero=2,zero1=rs+ag"),
        ("drops", "dp=4,cp=2,ep=4,zero=3"),
        ("drops", "dp=2,cp=2,tp=2,ep=8,cp_kind=ulysses"),
        ("k=2", "pp=2,dp=4,ep=2,zero=3,recompute=1"),
        ("k=8", "pp=2,dp=4,ep=4,micro_batches=2"),
        ("groups", "pp=2,dp=4,ep=2,schedule=interleaved,zero=1"),
        ("groups", "pp=2,dp=4,ep=4,schedule=interleaved,micro_batches=2,dedup"),
        ("groups", "pp=2,dp=2,tp=2,ep=4,schedule=dualpipe-v,zero=2"),
        ("k=2", "dp=8,ep=2,zero=2"),
        ("k=2", "dp=8,ep=2,zero=3,hsdp=2,micro_batches=2"),
        ("k=8", "dp=8,ep=2,zero=1,zero1=ar+ag,hsdp=2"),
        ("micro-batch", "dp=4,tp=2,ep=2,zero=2,hsdp=2,sp"),
        ("k=2", "dp=2,tp=4,ep=2,zero=3,hsdp=2"),
        ("k=2", "dp=4,tp=2,etp=2,ep=2,zero=3,hsdp=2,sp"),
        ("drops", "dp=4,cp=2,ep=2,zero=3,hsdp=2"),
        ("groups", "pp=2,dp=4,ep=2,zero=3,hsdp=2,schedule=zb-h1,micro_batches=2"),
    ],
    16: [
        ("k=2", "dp=8,tp=2,etp=2,ep=8"),
        ("k=2", "pp=2,dp=8,ep=8,micro_batches=2"),
        ("groups", "pp=2,dp=8,ep=8,schedule=interleaved,micro_batches=2"),
    ],
}  # fmt: skip


def trials(rank, world, jobs):
    return [trial(rank, world, job, STEPS) for job in jobs]


def check(job, records):
    """Losses, every gradient, weights, routing biases and norms to 1e-10; the same bits on every rank; exact transfers."""
    case = f"{job.layout}, {job.model.moe}"
    expected, _ = truth(job)
    for kind, error in compare(together(job, records), expected).items():
        assert error.value <= 1e-10, f"{case}: {kind}, {error.where} {error.value}"
    assert all(record.losses == records[0].losses for record in records), case
    assert differing(job, records) is None, case
    sent = {rank: record.sent for rank, record in enumerate(records)}
    rows = audit([planned(job, rank, STEPS, sent) for rank in sent], [record.transfers for record in records])
    assert [row.difference() for row in rows if not row.ok] == [], case
    assert ("ep", "all_to_all") in {(row.axis, row.op) for row in rows} or job.layout.ep == 1


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_trains_what_plain_torch_trains(pool, world):
    jobs = [asked(*case) for case in CASES[world]]
    for job, *records in zip(jobs, *pool.run(trials, world, jobs), strict=True):
        check(job, records)


@pytest.mark.parametrize(("mixture", "text"), [("k=2", "tp=4,ep=4"), ("k=8", "tp=4,ep=2,dedup"), ("k=2", "tp=4")])
@pytest.mark.parametrize("sequence", [1, 3])
def test_tensor_ranks_that_are_left_without_tokens_take_part(pool, mixture, text, sequence):
    """Where experts are not cut, tensor ranks share tokens out, and of fewer tokens than ranks some get none."""
    job = asked(mixture, text, batch=2)
    assert verify(replace(job, data=replace(job.data, sequence=sequence)), steps=2, pool=pool).failures == []


def test_so_do_sixteen_ranks():
    jobs = [asked(*case) for case in CASES[16]]
    with Pool(16) as pool:
        for job, *records in zip(jobs, *pool.run(trials, 16, jobs), strict=True):
            check(job, records)


def test_the_cases_cover_what_there_is():
    """ep 1, 2, 4 and 8 with dp alone, tp (both etp), cp, and pipelines of both kinds; every stage of ZeRO, every mixture."""
    cases = [(mixture, asked(mixture, text).layout) for of in CASES.values() for mixture, text in of]
    met = set()
    for _, layout in cases:
        kind = "dp"
        if layout.pp > 1:
            kind = layout.schedule
        elif layout.cp > 1:
            kind = "cp"
        elif layout.tp_size > 1:
            kind = f"tp, etp={layout.etp}"
        met.add((layout.ep, kind))
    kinds = ("dp", "tp, etp=1", "tp, etp=2", "1f1b", "interleaved")
    assert {(ep, kind) for ep in (1, 2, 4, 8) for kind in kinds} | {(ep, "cp") for ep in (1, 2, 4, 8)} <= met
    assert {layout.zero for _, layout in cases if layout.ep > 1} == {0, 1, 2, 3}
    assert {mixture for mixture, layout in cases if layout.ep > 1} == set(MIXTURES)
    assert {layout.recompute for _, layout in cases} == {"none", "full", 1}


# Statistics


def counted(rank, world, job):
    """(loads by step, what metrics.jsonl says of the last step) of a rank."""
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger())
    made = Trainer(job, here, MadeUpBatches(job, mesh.coordinate("dp", rank)))
    loads = [made.step(step).loads for step in range(2)]
    here.close()
    return loads, load_metrics(loads[-1], job.layout.ep)


@pytest.mark.parametrize(
    "text", ["dp=2,cp=2,ep=2", "dp=2,tp=2,ep=2,recompute=full", "dp=2,tp=2,etp=2", "pp=2,ep=2,schedule=dualpipe"]
)
def test_loads_of_all_layers_are_the_same_under_every_layout(pool, text):
    """Also where blocks are computed twice, or stages exist twice."""
    job = asked("drops", text)
    _, seen = truth(job)
    answers = pool.run(counted, 4, job)
    assert all(answer == answers[0] for answer in answers)
    loads, metrics = answers[0]
    for step, (by_layer, dropped) in zip(loads, seen[:2], strict=True):
        assert {of.layer: list(of.load.chosen) for of in step} == by_layer
        assert sum(of.load.dropped for of in step) == dropped > 0
    worst = max(max(counts) / np.mean(counts) for counts in seen[1][0].values())
    assert metrics["expert_load"] == pytest.approx(worst) and metrics["dropped"] == seen[1][1]
    ranks = max(np.sum(np.split(np.array(counts), job.layout.ep), axis=1).max() for counts in seen[1][0].values())
    assert metrics["rank_load"] == pytest.approx(ranks * job.layout.ep / sum(next(iter(seen[1][0].values()))))
    assert [row["layer"] for row in metrics["expert_layers"]] == job.model.mixtures


def evaluated(rank, world, job):
    """(loss of an evaluation of two micro-batches with fresh weights, what it moved, what routers sent)."""
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger())
    batches = MadeUpBatches(job, mesh.coordinate("dp", rank))
    made = Trainer(job, here, batches)
    loss = made.evaluate([batches.batch(step)[0] for step in (0, 1)])
    transfers, sent = here.ledger.transfers(), made.mixtures.sent_by_all()
    here.close()
    return loss, transfers, sent


@pytest.mark.parametrize(
    "text", ["dp=4,ep=2,zero=3,dedup", "dp=2,tp=2,ep=4", "pp=2,ep=2,dp=2", "dp=4,ep=2,zero=3,hsdp=2"]
)
def test_an_evaluation_leaves_auxiliary_losses_out_and_moves_what_is_planned(pool, text):
    job = asked("k=2", text)
    answers = pool.run(evaluated, 4, job)
    without = replace(job.model, moe=replace(job.model.moe, aux_loss=0.0, z_loss=0.0))
    alone = replace(job, model=without, layout=Layout(micro_batches=job.layout.micro_batches))
    ((loss, _, _),) = pool.run(evaluated, 1, alone)
    assert [answer[0] for answer in answers] == pytest.approx([loss] * 4, rel=1e-12)
    predicted = [
        [*evaluation_transfers(job, rank, 2, tokens=False), *routed_transfers(job, rank, sent, "evaluate", 1, 2)]
        for rank, (_, _, sent) in enumerate(answers)
    ]
    rows = audit(predicted, [transfers for _, transfers, _ in answers])
    assert [row.difference() for row in rows if not row.ok] == []


def test_what_is_expected_is_near_what_moves(pool):
    """The plan's means before a run (spec EP-4) against the run: within a few percent on random tokens and fresh weights."""
    job = asked("k=2", "dp=4,ep=4", batch=64)
    records = pool.run(trial, 4, job, 2)
    for op in ("forward", "backward"):
        expected = sum(t.sent for rank in range(4) for t in step_transfers(job, rank) if of_tokens(t, op)) * 2
        measured = sum(t.sent for record in records for t in record.transfers if of_tokens(t, op))
        assert measured == pytest.approx(expected, rel=0.08) and measured != expected


def of_tokens(transfer, phase):
    return (transfer.phase, transfer.axis, transfer.op) == (phase, "ep", "all_to_all")


def rows_of_products(rank, world, job):
    """Rows of each expert's product in one step, on this rank."""
    mesh, found, right = mesh_of(job), [], dispatch.grouped_mlp
    here = World(mesh, rank, Ledger()) if world > 1 else World.single()

    def kept(x, entries, *others):
        found.append(entries.counts.numpy())
        return right(x, entries, *others)

    with patch.object(dispatch, "grouped_mlp", kept):
        Trainer(job, here, MadeUpBatches(job, mesh.coordinate("dp", rank))).step(0)
    here.close()
    return np.array(found)


def test_on_n_ranks_an_expert_computes_n_times_the_tokens(pool):
    """Spec EP-2's 32 -> 1024 on 32 ranks scaled down to a training run: 3 -> 24 on 8 ranks, the work in all unchanged."""
    replicated, apart = (np.array(pool.run(rows_of_products, 8, asked("k=2", text))) for text in ("dp=8", "dp=8,ep=8"))
    assert replicated.shape == (8, 2, 8) and apart.shape == (8, 2, 1)  # ranks, layers, experts of a rank
    assert replicated.mean() == 2 * SEQUENCE * 2 / 8 == 3 and apart.mean() == 8 * 3
    assert replicated.sum() == apart.sum()
    alone, together = cost.tokens_per_expert(2 * SEQUENCE, 2, 8, 8)
    assert (alone, together) == (3, 24)


def crowded(rank, world, job):
    """Two steps in which a routing bias sends every token to one expert: (loads, received by phase, finite)."""
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger())
    made = Trainer(job, here, MadeUpBatches(job, mesh.coordinate("dp", rank)))
    for name, bias in made.model.named_buffers():
        bias[3] = 100.0
        assert name.endswith("router.bias")
    results = [made.step(step) for step in range(2)]
    received = sum(t.received for t in here.ledger.transfers() if t.axis == "ep" and t.op == "all_to_all")
    here.close()
    finite = not results[-1].skipped and all(bool(w.isfinite().all()) for _, w in made.states.weights())
    return load_metrics(results[-1].loads, job.layout.ep), received, finite


def test_the_worst_imbalance_completes_and_its_cost_is_in_the_metrics(pool):
    """Spec EP-5: all tokens go to expert 3 of 8, so to rank 1 of 4: it does four times the mean, and others wait."""
    one = asked("k=1", "dp=4,ep=4")
    job = replace(one, model=replace(one.model, moe=replace(one.model.moe, bias=True, bias_rate=0.0)))
    answers = pool.run(crowded, 4, job)
    assert all(finite for _, _, finite in answers)
    metrics = answers[0][0]
    assert metrics["expert_load"] == 8 and metrics["rank_load"] == 4 and metrics["expert_entropy"] == 0
    received = [received for _, received, _ in answers]
    assert received[1] > 2 * max(received[0], *received[2:])


# What must be found out


def with_stores(change, rank, world, job, steps):
    """A trial whose states are kept and summed as `change` makes them of the right ones."""
    right = trainer.stores_of
    with patch.object(trainer, "stores_of", lambda job, rank: change(*right(job, rank))):
        return trial(rank, world, job, steps)


def with_cut(store, **changes):
    return replace(store, cut=replace(store.cut, **changes))


def experts_summed_over_all(*run):
    """The gradients of experts are summed over the data axes as everything else's, so over ranks with other experts."""
    return with_stores(lambda *stores: [with_cut(replace(store, axes=("dp",)), axis="dp") for store in stores], *run)


def experts_sharded_over_all_copies(*run):
    """Experts are sharded over all ranks that hold them, as if there were no replicas, and summed across replicas again."""
    return with_stores(lambda shared, own: [shared, with_cut(own, axis="edp")], *run)


def replicas_apart(*run):
    """Experts' gradients stay in their replica."""
    return with_stores(lambda shared, own: [shared, with_cut(own, replicas=1)], *run)


def router_not_summed(rank, world, job, steps):
    """The known bug: a router's gradients are not summed over tensor ranks that route other tokens."""
    right = trainer.pieces_of

    def wrong(job, rank):
        return [
            replace(piece, shares=tuple(replace(share, partial=False) for share in piece.shares))
            if piece.parameter.mixture
            else piece
            for piece in right(job, rank)
        ]

    with patch.object(trainer, "pieces_of", wrong):
        return trial(rank, world, job, steps)


def losses_left_behind(rank, world, job, steps):
    """Auxiliary losses that no backward starts from."""
    from shoal.model import block

    def wrong(x, mixture, tokens):
        return mixture(x, tokens.counted, tokens.order)[0]

    with patch.object(block, "routed", wrong):
        return trial(rank, world, job, steps)


def losses_undivided(rank, world, job, steps):
    """The known bug: a loss that is not divided by the tokens of all ranks."""
    right = riding.attached
    with patch.object(riding, "attached", lambda y, auxiliary, seed: right(y, auxiliary, seed * 2)):
        return trial(rank, world, job, steps)


def squares_of_own_experts(rank, world, job, steps):
    """A norm that counts the experts of this rank alone."""
    right = trainer.stores_of

    def wrong(job, rank):
        return [replace(store, summed=tuple(a for a in store.summed if a != "ep")) for store in right(job, rank)]

    with patch.object(trainer, "stores_of", wrong):
        return trial(rank, world, job, steps)


def counts_of_chosen_experts(rank, world, job, steps):
    """Sends some tokens to another rank than their routers chose: numbers and bytes differ from those of the routing."""
    right = MixtureOfExperts._note
    with patch.object(MixtureOfExperts, "_note", lambda self, experts: right(self, (experts + 1) % 8)):
        return trial(rank, world, job, steps)


def bias_by_own_load(rank, world, job, steps):
    """Routing biases that follow the tokens of this rank alone."""
    right = mixtures.collect_loads
    with patch.object(mixtures, "collect_loads", lambda layers, count, group: right(layers, count, group.alone())):
        return trial(rank, world, job, steps)


@pytest.mark.parametrize(
    ("text", "broken", "line"),
    [
        ("dp=4,ep=2", experts_summed_over_all, "grad: gradient of blocks.0.mlp.experts"),
        ("dp=4,ep=2", experts_summed_over_all, "over edp: rank 0 planned"),
        ("dp=4,tp=2,ep=2,zero=2,hsdp=2", experts_sharded_over_all_copies, "grad: gradient of blocks.0.mlp.experts"),
        ("dp=4,tp=2,ep=2,zero=2,hsdp=2", experts_sharded_over_all_copies, "over eshard: rank 0 planned"),
        ("dp=4,ep=2,zero=3,hsdp=2", replicas_apart, "grad: gradient of blocks.0.mlp.experts"),
        ("dp=4,ep=2,zero=3,hsdp=2", replicas_apart, "backward all_reduce over replicate: rank 0 planned"),
        ("tp=2,ep=2", router_not_summed, "grad: gradient of blocks."),
        ("tp=2,ep=2", router_not_summed, "backward all_reduce over tp: rank 0 planned"),
        ("ep=2", losses_left_behind, "grad: gradient of blocks.0.mlp"),
        ("pp=2,ep=2", losses_undivided, "grad: gradient of blocks."),
        ("ep=2", squares_of_own_experts, "grad_norm: gradient norm at step "),
        (
            "ep=2",
            bias_by_own_load,
            "mlp.router.bias differs between rank 0 and rank 1, which should hold the same bits",
        ),
        ("ep=2", counts_of_chosen_experts, "forward all_to_all over ep: rank 0 planned"),
    ],
)
def test_what_is_broken_is_named(pool, text, broken, line):
    verdict = verify(asked("k=2", text), steps=2, pool=pool, run=broken)
    assert any(line in failure for failure in verdict.failures), verdict.failures


def test_a_cost_that_forgets_the_way_back_is_named(pool, monkeypatch):
    right = cost.row_transfers
    monkeypatch.setattr(experts.cost, "row_transfers", lambda *arguments: list(right(*arguments))[:-1])
    verdict = verify(asked("k=2", "ep=2"), steps=2, pool=pool)
    assert len(verdict.failures) == 1 and "backward all_to_all over ep: rank 0 planned" in verdict.failures[0]


# Weights and the command


def put_together(rank, world, job):
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger()) if world > 1 else World.single()
    made = Trainer(job, here, MadeUpBatches(job, mesh.coordinate("dp", rank)))
    made.step(0)
    whole = {name: weight.numpy() for name, weight in whole_weights(made).items()}
    here.close()
    return whole


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,ep=4",
        "dp=2,tp=2,etp=2,ep=2,zero=3",
        "pp=2,ep=2",
        "dp=4,ep=2,order=tp-dp-ep",
        "dp=4,ep=2,hsdp=2,zero=3",
    ],
)
def test_a_run_leaves_whole_weights_with_routing_biases(pool, text):
    job = asked("k=2", text)
    found, *others = pool.run(put_together, 4, job)
    (alone,) = pool.run(put_together, 1, replace(job, layout=Layout()))
    assert others == [{}] * 3 and set(found) == set(alone)
    assert {name for name in found if name.endswith("router.bias")} == {
        f"blocks.{layer}.mlp.router.bias" for layer in (0, 1)
    }
    for name, weight in alone.items():
        assert np.linalg.norm(found[name] - weight) <= 1e-12 * np.linalg.norm(weight), name


def test_the_command_picks_a_model_with_experts_and_writes_their_load(tmp_path, capsys):
    small = [
        "--train.batch",
        "4",
        "--data.sequence",
        "32",
        "--train.sample",
        "0",
        "--model.layers",
        "2",
        "--steps",
        "2",
        "--json",
    ]
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 200)
    code = main(["train", "--layout", "ep=2", "--out", str(tmp_path / "run"), "--data.path", str(path), *small])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and document["ok"] and all(row["ok"] for row in document["transfers"])
    assert any(row["axis"] == "ep" and row["measured_bytes"] > 0 for row in document["transfers"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(1 <= line["rank_load"] <= 2 and line["rank_load"] <= line["expert_load"] <= 8 for line in lines)
    assert all(line["dropped"] == 0 and 0 < line["expert_entropy"] <= np.log(8) for line in lines)
    assert [row["layer"] for row in lines[0]["expert_layers"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("ep=3 --train.batch 18", "layout.ep = 3 does not divide the model's 8 experts; 1, 2, 4 or 8 would"),
        ("dp=3,ep=2", "layout.ep = 2 does not divide dp x cp x tp = 3; 1 or 3 would"),
        ("ep=2 --model tiny", "layout.ep = 2 without experts in the model: there is nothing to spread; ep=1 or model.preset="),
        ("tp=2,etp=2 --model tiny", "layout.etp = 2 without experts in the model: there is nothing to cut; etp=1"),
        ("ep=2 --model.moe.top_k 9", "model.moe.top_k = 9 exceeds the 8 experts; 8 would do"),
        ("ep=2 --model.moe.router sofmax", "model.moe.router = sofmax is not one of softmax, sigmoid; did you mean softmax?"),
        ("ep=2 --model.mlp gelu", "model.mlp = gelu is no kind that experts have; swiglu would do, or no model.moe"),
        ("dp=1 --model moe-tiny --model.moe.first_dense 2", "model.moe.first_dense = 2 leaves none of the 2 layers experts"),
        ("dp=2,dedup", "layout.dedup = true with ep = 1: there are no expert ranks to send tokens to; ep=2 or"),
        ("tp=2x2 --model moe-tiny", "layout.tp = 2x2 with experts in the model: a grid of tensor ranks cuts no"),
        ("dp=4,ep=4,zero=3,hsdp=2", "layout.hsdp = 2 with experts that reach over several replicas: each replica shards the"),
        ("dp=4,ep=2,zero=3,hsdp=2,order=dp-ep", "layout.order = dp-ep with hsdp and ep above 1, and axes of tokens or"),
        ("cp=2,ep=2 --data.pad --data.sequence 31", "data.pad = true with experts in the model and a sequence that the layout"),
        (
            "tp=2,ep=2 --model.moe.capacity 1 --data.sequence 31",
            "data.sequence = 31 gives context ranks 31 tokens, which 2 tensor ranks do not share evenly, as "
            "model.moe.capacity wants; 30 or 32 would do",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words, line, capsys):
    assert main(["train", "--layout", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shoal: {line}") and error.count("\n") == 1, error
