"""The independent truth for layouts: a training loop in plain torch that knows no shoal but the model and its tokens."""

from dataclasses import replace

import torch

from shoal.axes.data.run import DataParallel
from shoal.comm.collectives import Handle
from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import pieces_of
from shoal.spec.job import DataSpec, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec
from shoal.train.schedule import learning_rate
from shoal.train.trainer import Trainer
from shoal.verify.assemble import disagreement, whole_record
from shoal.verify.compare import Record
from shoal.verify.trial import MadeUpBatches, trial

MODELS = {
    "llama-like": ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, positions_max=16),
    "gpt-like, tied, dropout": ModelSpec(
        layers=2, hidden=32, heads=4, ffn=48, vocab=61, positions_max=16, norm="layernorm", positions="learned",
        mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True, tied=True, dropout=0.1,
    ),
}  # fmt: skip
# One block of each kind, of which tests count what it keeps.
LLAMA = ModelSpec(layers=1, hidden=32, heads=8, kv_heads=8, ffn=50, vocab=61)
GPT = ModelSpec(
    layers=1, hidden=32, heads=8, ffn=128, vocab=61, norm="layernorm", positions="learned", mlp="gelu", qkv_bias=True,
    output_bias=True, mlp_bias=True, dropout=0.1,
)  # fmt: skip
STEPS = 5


def job(layout: str, model: ModelSpec, dtype: str = "float64", bucket_mb: float = 0.02) -> Job:
    train = TrainSpec(batch=16, dtype=dtype, warmup=2, steps=STEPS, learning_rate=3e-3, clip=0.5, bucket_mb=bucket_mb)
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=12), train)


def plain_torch(job: Job) -> Record:
    """The same training by hand on one process: whole batch, torch's AdamW over single parameters, torch's clipping."""
    torch.set_num_threads(1)
    dtype = torch.float64 if job.train.dtype == "float64" else torch.float32
    model = Decoder(job.model, dtype=dtype)
    initialise(model, job.model, job.train.seed)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": job.train.weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(job.train.beta1, job.train.beta2),
        eps=job.train.eps,
        foreach=False,
    )
    losses, norms, gradients = [], [], []
    alone = replace(job, layout=Layout())
    reader = Trainer(alone, World.single(), MadeUpBatches(alone, 0))  # only for its reading of a batch
    for step in range(STEPS):
        (batch,) = MadeUpBatches(alone, 0).batch(step)
        read = reader._batch(batch, step)
        logits = model(read.tokens, documents=read.documents, dropout=read.dropout)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), read.targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.double().numpy().copy() for name, p in named.items()})
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), job.train.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.train)
        optimizer.step()
    return Record(losses, norms, gradients, {name: p.detach().numpy() for name, p in named.items()}, [])


def together(job: Job, records: list[Record]) -> Record:
    """What the ranks of a job's layout saw, put together from their pieces."""
    return whole_record(records, [pieces_of(job, rank) for rank in range(job.layout.world)])


def differing(job: Job, records: list[Record]) -> str | None:
    """The first difference between ranks that hold the same weights, as a line."""
    return disagreement(
        [record.weights for record in records], [pieces_of(job, rank) for rank in range(job.layout.world)]
    )


def trial_without_sync(rank, world, job, steps):
    """A trial whose data ranks forget to sum their gradients."""
    leave = DataParallel._leave
    DataParallel._leave = lambda self, place: self.in_flight.update({place: Handle(self.buckets[place].gradients)})
    try:
        return trial(rank, world, job, steps)
    finally:
        DataParallel._leave = leave  # the pool's ranks live on
