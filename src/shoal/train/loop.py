"""A whole training run on one rank: data, steps, evaluation, metrics, and what is left in the output folder."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from safetensors.torch import save_file

from shoal.comm.world import World
from shoal.model.sample import sample
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.inventory import flops_per_token
from shoal.spec.job import Job
from shoal.spec.toml import job_toml
from shoal.train.data.batches import Batches, Dataset, MicroBatch
from shoal.train.data.tokenizer import load_tokenizer
from shoal.train.display import Display, peak_memory
from shoal.train.metrics import MetricsWriter
from shoal.train.trainer import Trainer
from shoal.transfer import Transfer

PROMPT = "def "  # what the sample at the end of a run continues


class NotFinite(RuntimeError):
    """Too many steps in a row had gradients that are not finite."""


@dataclass(frozen=True)
class Summary:
    """How a run ended, as rank 0 saw it. Losses in nats per token, memory in bytes, transfers of this rank."""

    out: str
    steps: int
    first_loss: float
    loss: float
    eval_loss: float | None
    tokens: int
    seconds: float
    tokens_per_s: float
    skipped: int
    peak_memory: int
    predicted: list[Transfer]
    measured: list[Transfer]
    text: str


def run(job: Job, world: World, tokens: Path, stream: TextIO) -> Summary:
    """Trains `job` on the token file `tokens`; every rank calls it, rank 0 writes and shows.

    Writes job.toml at the start, metrics.jsonl line by line and model.safetensors at the end into job.train.out.
    Raises NotFinite after train.max_skipped skipped steps in a row.
    """
    train, out = job.train, Path(job.train.out)
    batches = Batches(Dataset(tokens, job.data, "train"), job, world.group("dp").index)
    held_out = Batches(Dataset(tokens, job.data, "eval"), job, world.group("dp").index).first(train.eval_batches)
    trainer = Trainer(job, world, batches)
    leads = world.rank == 0
    if leads:
        out.mkdir(parents=True, exist_ok=True)
        _replace(out / "job.toml", job_toml(job).encode())
    peak = job.machine.peak(train.dtype)
    flops = flops_per_token(job.model, job.data.sequence)
    losses: list[float] = []
    skipped = in_a_row = seen = evaluations = 0
    eval_loss = None
    started = time.perf_counter()
    with MetricsWriter(out, train.log, active=leads) as metrics, Display(job, stream, active=leads) as display:
        for step in range(train.steps):
            begun = time.perf_counter()
            result = trainer.step(step)
            seconds = time.perf_counter() - begun
            seen += result.tokens
            in_a_row = in_a_row + 1 if result.skipped else 0
            skipped += result.skipped
            if not result.skipped:
                losses.append(result.loss)
            line = asdict(result) | {
                "skipped": skipped,
                "tokens_per_s": result.tokens / seconds,
                "seconds": seconds,
                "peak_memory": peak_memory(world.device.type),
                "utilisation": result.tokens / seconds * flops / (peak * world.size) if peak else None,
            }
            if step + 1 == train.steps or (train.eval_every and (step + 1) % train.eval_every == 0):
                eval_loss = line["eval_loss"] = trainer.evaluate(held_out)
                evaluations += 1
            metrics.write(line)
            display.step(line)
            if in_a_row >= train.max_skipped:
                raise NotFinite(
                    f"{in_a_row} steps in a row had a loss or gradients that are not finite (the last was step {step}); "
                    f"a smaller train.learning_rate than {train.learning_rate} or a longer train.warmup may do"
                )
        measured = world.ledger.transfers()
        text = _sample(trainer, job, tokens) if leads and train.sample else ""
    if leads:
        save_weights(trainer, out / "model.safetensors")
    elapsed = time.perf_counter() - started
    predicted = times(step_transfers(job, world.rank), train.steps)
    predicted += times(evaluation_transfers(job, world.rank), evaluations)
    return Summary(
        out=str(out),
        steps=train.steps,
        first_loss=losses[0],
        loss=losses[-1],
        eval_loss=eval_loss,
        tokens=seen,
        seconds=elapsed,
        tokens_per_s=seen / elapsed,
        skipped=skipped,
        peak_memory=peak_memory(world.device.type),
        predicted=predicted,
        measured=measured,
        text=text,
    )


def save_weights(trainer: Trainer, path: Path) -> None:
    """Writes every parameter under its own name as safetensors; a killed save leaves the old file, if any."""
    weights = {name: value.detach().cpu().clone() for name, value in trainer.model.named_parameters()}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(weights, unfinished, metadata={"model": json.dumps(asdict(trainer.job.model))})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
