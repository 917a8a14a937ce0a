"""A whole training run on one rank: data, steps, evaluation, metrics, and what is left in the output folder."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.model.sample import sample
from shoal.plan.copies import check_transfers
from shoal.plan.experts import Sent, routed_transfers
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.errors import RequestError
from shoal.spec.inventory import flops_per_token
from shoal.spec.job import Job
from shoal.spec.toml import job_toml
from shoal.train.checkpoint.index import Progress
from shoal.train.checkpoint.run import Checkpoints
from shoal.train.consistency import Consistency
from shoal.train.data.batches import Batches, Dataset
from shoal.train.data.tokenizer import load_tokenizer
from shoal.train.display import Display, peak_memory
from shoal.train.experts import load_metrics
from shoal.train.files import room_in, whole
from shoal.train.metrics import MetricsWriter
from shoal.train.summary import NotFinite, Summary
from shoal.train.trainer import StepResult, Trainer
from shoal.train.weights import one_process, save_weights, whole_weights
from shoal.transfer import Transfer

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

    @classmethod
    def after(cls, progress: Progress) -> Self:
        """That of a run which continues another."""
        losses = [loss for loss in (progress.first_loss, progress.loss) if math.isfinite(loss)]
        return cls(
            losses,
            progress.eval_loss,
            tokens=progress.tokens,
            skipped=progress.skipped,
            skipped_in_a_row=progress.skipped_in_a_row,
        )

    @property
    def first_loss(self) -> float:
        return self.losses[0] if self.losses else math.nan

    @property
    def loss(self) -> float:
        return self.losses[-1] if self.losses else math.nan

    def progress(self) -> Progress:
        """What another run needs to continue this one."""
        return Progress(self.tokens, self.skipped, self.skipped_in_a_row, self.first_loss, self.loss, self.eval_loss)

    def add(self, result: StepResult) -> None:
        self.tokens += result.tokens
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            self.losses.append(result.loss)


def run(job: Job, world: World, tokens: Path, stream: TextIO) -> Summary:
    """Trains `job` on the token file `tokens`; every rank calls it, rank 0 writes and shows on `stream`.

    Writes job.toml at the start, metrics.jsonl line by line, checkpoints, and model.safetensors at the end into
    job.train.out. Raises NotFinite after train.max_skipped skipped steps in a row.
    """
    train, out, leads = job.train, Path(job.train.out), world.rank == 0
    data_rank = world.group("dp").index
    data = Dataset(tokens, job.data, "train")
    trainer = Trainer(job, world, Batches(data, job, data_rank))
    held_out = Batches(Dataset(tokens, job.data, "eval"), job, data_rank).first(train.eval_batches)
    checkpoints = Checkpoints(trainer, data.file.content, warn=lambda line: print(line, file=stream, flush=True))
    resumed = checkpoints.start()
    first, tally = (resumed.index.step, Tally.after(resumed.index.progress)) if resumed else (0, Tally())
    tokens_before = tally.tokens
    consistency = Consistency(trainer)
    if leads:
        out.mkdir(parents=True, exist_ok=True)
        with whole(out / "job.toml") as unfinished:
            unfinished.write_text(job_toml(job), encoding="utf-8")
    started = time.perf_counter()
    with (
        room_in(out),
        MetricsWriter(out, train.log, leads, first if resumed and resumed.in_place else None) as metrics,
        Display(job, stream, active=leads, first=first) as display,
        checkpoints,
    ):
        for step in range(first, train.steps):
            world.ledger.whereabouts.step(step)
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
            checkpoints.poll()
            if consistency.due(step + 1):
                consistency.check(step + 1)  # before what is wrong would be saved
            if checkpoints.due(step + 1):
                metrics.sync()
                with world.ledger.at(phase="save"):
                    checkpoints.save(step + 1, tally.progress())
            if tally.skipped_in_a_row == train.max_skipped:
                raise NotFinite(
                    f"{train.max_skipped} steps in a row, up to step {step}, had a loss or gradients that are not finite; "
                    f"train.learning_rate below {train.learning_rate} or a longer train.warmup may do"
                )
    world.ledger.whereabouts.step(None)
    measured, sent = world.ledger.transfers(), trainer.mixtures.sent_by_all()
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
        first_loss=tally.first_loss,
        loss=tally.loss,
        eval_loss=tally.eval_loss,
        tokens=tally.tokens,
        seconds=seconds,
        tokens_per_s=(tally.tokens - tokens_before) / seconds,
        skipped=tally.skipped,
        skipped_at_end=tally.skipped_in_a_row,
        peak_memory=peak_memory(world.device.type),
        text=text,
        predicted=_planned(
            job, world.rank, train.steps - first, len(held_out), tally.evaluations, consistency.made, sent
        ),
        measured=measured,
    )


def _planned(
    job: Job, rank: int, steps: int, forwards: int, evaluations: int, checks: int, sent: Mapping[int, Sent]
) -> list[Transfer]:
    """The plan of a run's steps, of its evaluations of `forwards` micro-batches and of its checks of replicas.

    sent: where its tokens went, by rank.
    """
    return [
        *times(step_transfers(job, rank, tokens=False), steps),
        *times(evaluation_transfers(job, rank, forwards, tokens=False), evaluations),
        *(times(check_transfers(job, rank), checks) if checks else []),
        *routed_transfers(job, rank, sent, "step", steps, job.layout.micro_batches),
        *routed_transfers(job, rank, sent, "evaluate", evaluations, forwards),
    ]


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


def _line(job: Job, world: World, result: StepResult, tally: Tally, seconds: float) -> dict[str, Any]:
    """One line of metrics.jsonl. seconds: of this step; skipped counts the steps of the run so far."""
    tokens_per_s = result.tokens / seconds
    peak = job.machine.peak(job.train.dtype)
    flops = tokens_per_s * flops_per_token(job.model, job.data.sequence)
    measured = {name: value for name, value in vars(result).items() if name != "loads"}
    return measured | {
        "skipped": tally.skipped,
        "seconds": seconds,
        "tokens_per_s": tokens_per_s,
        "utilisation": flops / (peak * world.size) if peak else None,
        "peak_memory": peak_memory(world.device.type),
        **load_metrics(result.loads, job.layout.ep),
    }
