"""Pipelines against torch.distributed.pipelining on 2 and 4 ranks of this machine, and against shoal's own simulator.

Both sides run the same stages of the same decoder (shoal's modules) from the same weights, on the same micro-batches of
the same tokens, with torch's fused AdamW: GPipe, 1F1B, interleaved 1F1B, and a zero-bubble schedule, ZB-H1 against
torch's ScheduleInterleavedZeroBubble with one stage per rank. torch finds the two halves of a split backward in autograd's
graph by itself. That asks for operations that can be halved: a loss that makes its gradients in forward cannot, so there
torch's last stage ends in its own linear layer and cross-entropy; shoal's linear layers cannot either, and compute both
halves twice, so there is a second contender with torch's own, which are slower on some processors.

    python benchmarks/peers_pipeline.py [--rounds 12] [--only NAME ...] [--json]
    python benchmarks/peers_pipeline.py --predict [--rounds 12] [--json]

--predict times every instruction of shoal's engine, puts the medians into the simulator, and holds the makespan and the
bubble it foretells against those of the clock.
"""

import argparse
import json
import statistics
import sys

from harness import WARM_UP, Contender, main
from training import adamw, job_of, trainer_of

SEQUENCE, BATCH, MICRO_BATCHES, LAYERS = 256, 8, 8, 8
RANKS = (2, 4)
TOKENS = SEQUENCE * BATCH
PEERS = {  # torch's schedules by the names of shoal's
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
}
PREDICTED = (*PEERS, "breadth-first", "zb-v", "dualpipe", "dualpipe-v")


OWN_LINEAR = ", torch's linear layers"


def peers(schedule, ranks):
    """The names of torch's contenders."""
    name = f"torch {PEERS[schedule]}, {ranks} ranks"
    return (name, name + OWN_LINEAR) if schedule == "zb-h1" else (name,)


CONTENDERS = {
    name: contender
    for ranks in RANKS
    for schedule in PEERS
    for name, contender in (
        *((peer, Contender(ranks, TOKENS)) for peer in peers(schedule, ranks)),
        (f"shoal pp={ranks},schedule={schedule}", Contender(ranks, TOKENS, peers(schedule, ranks))),
    )
}


def job(layout):
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=LAYERS, hidden=256, heads=4, vocab=257)
    return job_of(model, f"{layout},micro_batches={MICRO_BATCHES}", SEQUENCE, BATCH)


def stepper(name, rank, options):
    if name.startswith("shoal"):
        trainer = trainer_of(job(name.removeprefix("shoal ")), rank)
        return lambda step: trainer.step(step).loss
    ranks = CONTENDERS[name].ranks
    schedule = next(schedule for schedule in PEERS if name in peers(schedule, ranks))
    return torch_step(job(f"pp={ranks},schedule={schedule}"), rank, own_linear=name.endswith(OWN_LINEAR))


def torch_step(asked, rank, own_linear):
    """A function that trains on step number n with torch's schedule and returns the mean loss.

    own_linear: torch's linear layers in place of shoal's.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from shoal.kernels import linear
    from shoal.model.decoder import Decoder
    from shoal.model.init import initialise
    from shoal.plan.pieces import mesh_of, pieces_of
    from shoal.plan.stages import chunks_of, schedule_of
    from shoal.verify.trial import MadeUpBatches

    if own_linear:
        linear._ONEDNN = False
    plan, mesh = schedule_of(asked), mesh_of(asked)
    decoder = Decoder(asked.model, stages=chunks_of(asked, mesh, rank))
    initialise(decoder, asked.model, asked.train.seed, pieces_of(asked, rank))
    splits = asked.layout.schedule == "zb-h1"
    stages = [
        pipelining.PipelineStage(
            part(decoder, number), plan.stage_of(rank, number), plan.stages, torch.device("cpu"), group=dist.group.WORLD
        )
        for number in range(len(decoder.stages))
    ]
    seed = [1.0]  # d total / d loss of this step

    def loss_of(x, targets):
        if not splits:
            return decoder.finished(x, targets) * seed[0]
        logits = torch.nn.functional.linear(decoder.head.norm(x), decoder.head.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * seed[0]

    make = getattr(pipelining, PEERS[asked.layout.schedule])
    several = asked.layout.schedule in ("interleaved", "zb-h1")
    schedule = make(stages if several else stages[0], MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    optimizer = adamw(decoder, asked.train)
    batches = MadeUpBatches(asked, 0)
    first, last = (any(getattr(stage, end) for stage in decoder.stages) for end in ("first", "last"))

    def step(number):
        micro_batches = batches.batch(number)
        tokens, targets = (
            torch.cat([torch.from_numpy(getattr(micro_batch, name)) for micro_batch in micro_batches])
            for name in ("tokens", "targets")
        )
        seed[0] = 1 / int((targets >= 0).sum())
        optimizer.zero_grad()
        losses = []
        schedule.step(
            *([tokens] if first else []), target=targets if last else None, losses=losses, return_outputs=False
        )
        optimizer.step()
        total = torch.stack(losses).sum().double().reshape(1) if losses else torch.zeros(1, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    return step


def part(decoder, number):
    """One of the decoder's stages as torch wants it: tensors in, a tensor out, and no loss."""
    import torch
    from torch import nn

    from shoal.model.batch import Batch

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.chunk = decoder.chunk(number)  # for its parameters

        def forward(self, x):
            stage = decoder.stages[number]
            if stage.first:
                return decoder.through(None, Batch(x), stage)
            return decoder.through(x, Batch(x.new_empty(x.shape[:2], dtype=torch.int64)), stage)

    return Part()


# ---- what the simulator foretells, against the clock


def timed(rank, ranks, schedule, rounds):
    """By step, (instruction, start, stop) of all that this rank's engine ran, in seconds of one clock for all ranks."""
    import torch

    torch.set_num_threads(1)
    trainer = trainer_of(job(f"pp={ranks},schedule={schedule}"), rank)
    engine, logs = trainer.pipeline.engine, []
    run = engine.step

    def logged(*arguments):
        ran = run(*arguments, timed=True)
        logs.append([(str(done.instruction), done.start, done.stop) for done in ran.log])
        return ran

    engine.step = logged
    for step in range(WARM_UP + rounds):
        trainer.step(step)
    trainer.world.close()
    return logs[WARM_UP:]


def foretold(schedule, logs):
    """(makespan, bubble) of the simulator, which is given the median duration of every instruction on every rank."""
    from shoal.axes.pipeline.schedules.instruction import parts
    from shoal.axes.pipeline.simulate import simulate

    durations = []
    for of_rank in logs:
        by_place = zip(*of_rank, strict=True)  # the same instruction in every step
        durations.append({runs[0][0]: statistics.median(stop - start for _, start, stop in runs) for runs in by_place})
    timeline = simulate(schedule, lambda rank, step: sum(durations[rank][str(x)] for x in parts(step)))
    return timeline.makespan, timeline.bubble


def clocked(logs):
    """(makespan, bubble) of every step: from the first start to the last stop on any rank; idle over useful time."""
    for step in zip(*logs, strict=True):
        makespan = max(log[-1][2] for log in step) - min(log[0][1] for log in step)
        busy = sum(stop - start for log in step for _, start, stop in log)
        yield makespan, (makespan * len(step) - busy) / busy


def predict(rounds, as_json):
    from shoal.axes.pipeline.cost import bubble
    from shoal.launch.pool import Pool
    from shoal.plan.stages import schedule_of

    rows = []
    with Pool(max(RANKS)) as pool:
        for ranks in RANKS:
            for name in PREDICTED:
                schedule = schedule_of(job(f"pp={ranks},schedule={name}"))
                logs = pool.run(timed, ranks, name, rounds)
                makespan, share = foretold(schedule, logs)
                makespans, shares = zip(*clocked(logs), strict=True)
                rows.append(
                    {
                        "schedule": name,
                        "ranks": ranks,
                        "makespan": statistics.median(makespans),
                        "predicted_makespan": makespan,
                        "bubble": statistics.median(shares),
                        "predicted_bubble": share,
                        "bubble_of_equal_stages": bubble(name, ranks, MICRO_BATCHES).ratio,
                    }
                )
                print(f"{name} on {ranks} ranks", file=sys.stderr)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':22} {'makespan ms':>11} {'predicted':>10} {'':>7} {'bubble':>7} {'predicted':>10} {'equal stages':>13}")
    for row in rows:
        print(
            f"{row['schedule']:14} {row['ranks']} ranks {row['makespan'] * 1e3:11.1f} {row['predicted_makespan'] * 1e3:10.1f} "
            f"{row['predicted_makespan'] / row['makespan'] - 1:+7.1%} {row['bubble']:7.3f} {row['predicted_bubble']:10.3f} "
            f"{row['bubble_of_equal_stages']:13.3f}"
        )


if __name__ == "__main__":
    if "--predict" in sys.argv:
        options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        options.add_argument("--predict", action="store_true")
        options.add_argument("--rounds", type=int, default=12)
        options.add_argument("--json", action="store_true")
        asked = options.parse_args()
        predict(asked.rounds, asked.json)
    else:
        main(__doc__, CONTENDERS, stepper)
