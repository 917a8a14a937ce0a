"""Data parallelism running: against a loop in plain torch that knows no shoal but the model, and broken on purpose."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from reference import MODELS, STEPS, differing, job, plain_torch, trial_without_sync
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.train.trainer import Trainer
from shoal.verify.compare import Record, compare
from shoal.verify.trial import MadeUpBatches, trial


@pytest.mark.parametrize(
    "layout", ["dp=1", "dp=2", "dp=4", "dp=1,micro_batches=4", "dp=2,micro_batches=2", "dp=4,micro_batches=4"]
)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_trains_what_plain_torch_trains(pool, layout, model):
    asked = job(layout, MODELS[model])
    records = pool.run(trial, asked.layout.world, asked, STEPS)
    errors = compare(records[0], plain_torch(asked))
    assert {kind: error for kind, error in errors.items() if error.value > 1e-10} == {}
    assert differing(asked, records) is None


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=4,micro_batches=2"])
def test_float32_agrees_in_losses_and_gradients(pool, layout):
    asked = job(layout, MODELS["llama-like"], "float32")
    records = pool.run(trial, asked.layout.world, asked, 1)
    truth = plain_torch(asked)
    first = Record(truth.losses[:1], truth.grad_norms[:1], truth.gradients[:1], truth.weights, [])
    errors = compare(records[0], first)
    assert max(errors[kind].value for kind in ("loss", "grad", "grad_norm")) < 1e-5


def test_bfloat16_keeps_float32_master_weights(pool):
    """Updates far below bfloat16's resolution still add up, since they add up in the masters."""
    asked = job("dp=2", MODELS["llama-like"], "bfloat16")
    tiny = replace(asked, train=replace(asked.train, learning_rate=1e-4, warmup=0, schedule="constant", clip=0.0))
    records = pool.run(masters_after, 2, tiny, 20)
    for master, weight, start in records[0]:
        assert np.array_equal(weight, torch.tensor(master).bfloat16().float().numpy())
        moved = np.abs(master - start).mean()
        assert 1e-4 < moved < 2.2e-3, "20 steps of Adam at 1e-4 move a weight by up to 2e-3"


def masters_after(rank, world, job, steps):
    trainer = Trainer(job, World(Mesh.of(job.layout), rank, Ledger()), MadeUpBatches(job, rank))
    masters = [states["master"] for states in trainer.optimizer.states]
    starts = [master.numpy().copy() for master in masters]
    for step in range(steps):
        trainer.step(step)
    weights = [weights.float().numpy() for weights, _, _ in trainer.optimizer.runs]
    return list(zip([master.numpy().copy() for master in masters], weights, starts, strict=True))


def test_buckets_leave_while_backward_still_runs_and_only_in_the_last_micro_batch(pool):
    asked = job("dp=2,micro_batches=4", MODELS["llama-like"])
    (order, buckets), _ = pool.run(order_of_events, 2, asked)
    assert buckets > 3
    assert order.count("all_reduce") == buckets
    assert order[0].startswith("all_reduce") or "all_reduce" not in order[: order.index("micro-batch 3")]
    last_pass = order[order.index("micro-batch 3") :]
    assert last_pass.index("all_reduce") < last_pass.index("embedding gradient ready")


def order_of_events(rank, world, job):
    order = []
    here = World(Mesh.of(job.layout), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, rank))
    leave, run = trainer.states._leave, trainer.model.run
    passes = iter(range(99))

    def watched_leave(bucket):
        order.append("all_reduce")
        leave(bucket)

    def watched_run(*arguments, **options):
        order.append(f"micro-batch {next(passes)}")
        return run(*arguments, **options)

    trainer.states._leave, trainer.model.run = watched_leave, watched_run
    trainer.model.embedding.weight.register_post_accumulate_grad_hook(
        lambda _: order.append("embedding gradient ready")
    )
    trainer.step(0)
    here.close()
    return order, len(trainer.states.buckets)


def test_a_rank_without_the_all_reduce_is_caught(pool):
    """The known fault 'gradients are never synchronised' shows in gradients, weights and replicas, not in the loss."""
    asked = job("dp=2", MODELS["llama-like"])
    records = pool.run(trial_without_sync, 2, asked, 3)
    errors = compare(records[0], plain_torch_steps(asked, 3))
    assert errors["grad"].value > 1e-3 and errors["weights"].value > 1e-6
    assert "differs between rank 0 and rank 1" in differing(asked, records)


def plain_torch_steps(job, steps):
    truth = plain_torch(job)
    return Record(truth.losses[:steps], truth.grad_norms[:steps], truth.gradients[:steps], truth.weights, [])


def test_a_step_that_is_not_finite_changes_nothing_and_says_so(pool):
    asked = job("dp=2", MODELS["llama-like"])
    before, after, result = pool.run(step_with_a_nan, 2, asked)[0]
    assert result.skipped and np.isnan(result.grad_norm)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def step_with_a_nan(rank, world, job):
    here = World(Mesh.of(job.layout), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, rank))
    weights = [bucket.weights for bucket in trainer.states.buckets]
    before = [weight.numpy().copy() for weight in weights]
    if rank == 1:  # on one rank only: all must agree to skip
        trainer.model.embedding.weight.register_hook(lambda gradient: gradient * float("nan"))
    result = trainer.step(0)
    after = [weight.numpy().copy() for weight in weights]
    here.close()
    return before, after, result
