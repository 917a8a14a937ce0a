"""A whole training run on one rank: data, steps, evaluation, metrics, and what is left in the output folder."""

import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.model.sample import sample
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.errors import RequestError
from shoal.spec.inventory import flops_per_token
from shoal.spec.job import Job
from shoal.spec.toml import job_toml
from shoal.train.data.batches import Batches, Dataset
from shoal.train.data.tokenizer import load_tokenizer
from shoal.train.display import Display, peak_memory
from shoal.train.files import removed, room_in
from shoal.train.metrics import MetricsWriter
from shoal.train.summary import NotFinite, Summary
from shoal.train.trainer import StepResult, Trainer
from shoal.train.weights import one_process, save_weights, whole_weights

PROMPT = "def "  # what the sample at the end of a run continues
SAMPLE_TEMPERATURE = 0.7


@dataclass
class Tally:
    """What a run has done so far. Losses in nats per token; `tokens` counts the valid ones, of all ranks."""

    losses: list[float] = field(default_factory=list)
    eval_loss: float = math.nan
    evaluations: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    def add(self, result: StepResult) -> None:
        self.tokens += result.tokens
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            self.losses.append(result.loss)


def run(job: Job, world: World, tokens: Path, stream: TextIO) -> Summary:
    """Trains `job` on the token file `tokens`; every rank calls it, rank 0 writes and shows on `stream`.

    Writes job.toml at the start, metrics.jsonl line by line and model.safetensors at the end into job.train.out.
    Raises NotFinite after train.max_skipped skipped steps in a row.
    """
    train, out, leads = job.train, Path(job.train.out), world.rank == 0
    data_rank = world.group("dp").index
    trainer = Trainer(job, world, Batches(Dataset(tokens, job.data, "train"), job, data_rank))
    held_out = Batches(Dataset(tokens, job.data, "eval"), job, data_rank).first(train.eval_batches)
    if leads:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "job.toml", job_toml(job).encode())
    tally, started = Tally(), time.perf_counter()
    with (
        room_in(out),
        MetricsWriter(out, train.log, active=leads) as metrics,
        Display(job, stream, active=leads) as display,
    ):
        for step in range(train.steps):
            begun = time.perf_counter()
            result = trainer.step(step)
            seconds = time.perf_counter() - begun
            tally.add(result)
            line = _line(job, world, result, tally, seconds)
            if step + 1 == train.steps or (train.eval_every and (step + 1) % train.eval_every == 0):
                line["eval_loss"] = tally.eval_loss = trainer.evaluate(held_out)
                tally.evaluations += 1
            metrics.write(line)
            display.step(line)
            if tally.skipped_in_a_row == train.max_skipped:
                raise NotFinite(
                    f"{train.max_skipped} steps in a row, up to step {step}, had a loss or gradients that are not finite; "
                    f"train.learning_rate below {train.learning_rate} or a longer train.warmup may do"
                )
    measured = world.ledger.transfers()
    weights = whole_weights(trainer)
    text = ""
    if leads:
        save_weights(trainer, weights, out / "model.safetensors")
        if train.sample:
            text = write_sample(one_process(trainer, weights), job)
    seconds = time.perf_counter() - started
    return Summary(
        out=str(out),
        steps=train.steps,
        first_loss=tally.losses[0] if tally.losses else math.nan,
        loss=tally.losses[-1] if tally.losses else math.nan,
        eval_loss=tally.eval_loss,
        tokens=tally.tokens,
        seconds=seconds,
        tokens_per_s=tally.tokens / seconds,
        skipped=tally.skipped,
        skipped_at_end=tally.skipped_in_a_row,
        peak_memory=peak_memory(world.device.type),
        text=text,
        predicted=times(step_transfers(job, world.rank), train.steps)
        + times(evaluation_transfers(job, world.rank, len(held_out)), tally.evaluations),
        measured=measured,
    )


def write_sample(model: Decoder, job: Job) -> str:
    """What the model writes after PROMPT, or after an end of document where the tokenizer has no ids for PROMPT."""
    tokenizer = load_tokenizer(job.data.tokenizer)
    try:
        prompt = list(tokenizer.encode(PROMPT))
    except RequestError:
        prompt = []
    prompt = prompt or [tokenizer.eod]
    written = sample(model, prompt, job.train.sample, SAMPLE_TEMPERATURE, job.train.seed)
    return tokenizer.decode([*prompt, *written])


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with room_in(path.parent), removed(unfinished):
        unfinished.write_bytes(content)
        unfinished.replace(path)


def _line(job: Job, world: World, result: StepResult, tally: Tally, seconds: float) -> dict[str, Any]:
    """One line of metrics.jsonl. seconds: of this step; skipped counts the steps of the run so far."""
    tokens_per_s = result.tokens / seconds
    peak = job.machine.peak(job.train.dtype)
    flops = tokens_per_s * flops_per_token(job.model, job.data.sequence)
    return asdict(result) | {
        "skipped": tally.skipped,
        "seconds": seconds,
        "tokens_per_s": tokens_per_s,
        "utilisation": flops / (peak * world.size) if peak else None,
        "peak_memory": peak_memory(world.device.type),
    }
