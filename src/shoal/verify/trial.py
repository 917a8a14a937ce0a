"""A trial: a few training steps of a job on made-up tokens, with everything recorded that a layout must not change."""

from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.plan.pieces import mesh_of
from shoal.spec.job import Job
from shoal.train.data.share import MicroBatch, share
from shoal.train.trainer import Trainer
from shoal.verify.choices import joined, written_down
from shoal.verify.compare import Executed, Record
from shoal.verify.measure import measured_step


class MadeUpBatches:
    """Random tokens, a function of (seed, step, global sample); targets invalid at random, so ranks count unevenly.

    whole: every target counts, and sequences are as long as the layout wants them.
    """

    def __init__(self, job: Job, dp_rank: int, whole: bool = False):
        self.job, self.dp_rank, self.whole = job, dp_rank, whole

    def batch(self, step: int) -> list[MicroBatch]:
        job = self.job
        random = np.random.default_rng((job.train.seed, step))
        length = job.sequence if self.whole else job.data.sequence
        text = random.integers(0, job.model.vocab, (job.train.batch, length + 1))
        tokens, targets = text[:, :-1], text[:, 1:].copy()
        kept = random.uniform(0.2, 1.0, (job.train.batch, 1))  # each sample keeps another part of its targets
        if not self.whole:
            targets[random.uniform(size=targets.shape) > kept] = -100
        documents = None
        if job.data.packing == "packed":
            documents = np.cumsum(random.uniform(size=targets.shape) < 4 / job.data.sequence, axis=1)
        samples = step * job.train.batch + np.arange(job.train.batch)
        return [
            MicroBatch(tokens[part], targets[part], samples[part], None if documents is None else documents[part])
            for part in share(job.train.batch, job.layout.micro_batches, job.layout.dp, self.dp_rank)
        ]


def trial(rank: int, world: int, job: Job, steps: int) -> Record:
    """Runs `steps` steps of the job as `rank` of an initialised group of `world`, and one more that is measured alone.

    Called on every rank.
    """
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger()) if world > 1 else World.single()
    trainer = Trainer(job, here, MadeUpBatches(job, mesh.coordinates(rank)["dp"]))
    rounding = job.train.dtype != "float64"
    gradients: list[dict[str, np.ndarray]] = []
    starts: list[dict[str, np.ndarray]] = []
    results = []
    with ExitStack() as stack:
        chosen = stack.enter_context(written_down(trainer)) if rounding else {}
        for step in range(steps):
            if rounding:
                starts.append(arrays(trainer.states.weights()))
            results.append(trainer.step(step, inspect=lambda states: gradients.append(arrays(states.gradients()))))
    weights, buffers = arrays(trainer.states.weights()), arrays(trainer.model.named_buffers())
    transfers, sent = here.ledger.transfers(), trainer.mixtures.sent()
    trainer.batches = MadeUpBatches(job, mesh.coordinates(rank)["dp"], whole=True)
    before = trainer.mixtures.routed()
    held = measured_step(trainer, steps)
    routed = {layer: after - before[layer] for layer, after in trainer.mixtures.routed().items()}
    here.close()
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    return Record(
        losses,
        norms,
        gradients,
        weights,
        transfers,
        buffers,
        sent,
        held,
        routed,
        executed(trainer),
        starts,
        joined(chosen),
    )


def executed(trainer: Trainer) -> Executed | None:
    """What a pipeline did in the last step."""
    if trainer.pipeline is None or trainer.pipeline.ran is None:
        return None
    ran = trainer.pipeline.ran
    return Executed([str(done.instruction) for done in ran.log], ran.peak)


def arrays(named: Iterable[tuple[str, Tensor]]) -> dict[str, np.ndarray]:
    """Copies by name, of 16-bit tensors in float32."""
    exact = ((name, tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))) for name, tensor in named)
    return {name: tensor.cpu().numpy().copy() for name, tensor in exact}
