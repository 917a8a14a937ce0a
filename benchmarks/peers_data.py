"""Data parallelism and ZeRO against torch's own: DDP, ZeroRedundancyOptimizer, FSDP2, on 2 ranks of this machine.

Every contender trains the same decoder (shoal's) in the same dtype on the same tokens, in processes of its own, one
thread per rank; all take a step in turn, round after round, each round in another order, so that a machine whose speed
drifts drifts for all. The
figures are medians of step time, tokens per second of all ranks together, the ratio to the peer, and the peak memory of
a rank's process. Losses after the last step are shown too: equal mathematics gives equal losses.

    python benchmarks/peers_data.py [--rounds 15] [--dtype float32|bfloat16] [--json]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTENDERS = {  # name: the peer it is held against
    "torch DDP": None,
    "shoal dp=2": "torch DDP",
    "torch DDP + ZeroRedundancyOptimizer": None,
    "shoal zero=1": "torch DDP + ZeroRedundancyOptimizer",
    "torch FSDP2, reshard_after_forward=False": None,
    "shoal zero=2": "torch FSDP2, reshard_after_forward=False",
    "torch FSDP2": None,
    "shoal zero=3": "torch FSDP2",
}
RANKS = 2
SEQUENCE, BATCH = 256, 8  # of both ranks together


def job(dtype, layout):
    from shoal.spec.job import DataSpec, Job, TrainSpec
    from shoal.spec.layout import Layout
    from shoal.spec.machine import Machine
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=6, hidden=256, heads=4, vocab=257)
    train = TrainSpec(batch=BATCH, dtype=dtype, warmup=0, schedule="constant", clip=0.0)
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=SEQUENCE), train)


def stepper(name, rank, dtype):
    """A function that trains on step number n and returns the loss of this rank's part."""
    from shoal.comm.ledger import Ledger
    from shoal.comm.world import World
    from shoal.mesh import Mesh
    from shoal.train.trainer import Trainer
    from shoal.verify.trial import MadeUpBatches

    if name.startswith("shoal"):
        layout = "dp=2" if name == "shoal dp=2" else f"dp=2,{name.removeprefix('shoal ')}"
        asked = job(dtype, layout)
        trainer = Trainer(asked, World(Mesh.of(asked.layout), rank, Ledger()), MadeUpBatches(asked, rank))
        return lambda step: trainer.step(step).loss
    return peer(name, rank, job(dtype, "dp=2"))


def peer(name, rank, asked):
    """torch's own tools around the same decoder; the loss is summed over ranks and divided by the global token count."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from shoal.model.decoder import Decoder
    from shoal.model.init import initialise
    from shoal.verify.trial import MadeUpBatches

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Decoder(asked.model, getattr(torch, asked.train.dtype))
            initialise(self.decoder, asked.model, asked.train.seed)

        def forward(self, tokens, targets):
            return self.decoder.loss(tokens, targets)

    whole = Loss()
    if "FSDP2" in name:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        again = "False" not in name
        for _, unit in whole.decoder.units():
            fully_shard(unit, mesh=mesh, reshard_after_forward=again)
        model = fully_shard(whole, mesh=mesh, reshard_after_forward=again)
    else:
        model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    options = {
        "lr": asked.train.learning_rate,
        "betas": (asked.train.beta1, asked.train.beta2),
        "eps": asked.train.eps,
        "weight_decay": asked.train.weight_decay,
        "fused": True,
    }
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if "Redundancy" in name:
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    batches = MadeUpBatches(asked, rank)

    def step(number):
        (batch,) = batches.batch(number)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        counted = torch.tensor([float((targets >= 0).sum())])
        dist.all_reduce(counted)
        loss = model(tokens, targets)
        optimizer.zero_grad()
        (loss * (RANKS / counted.item())).backward()  # the peers average over the ranks
        optimizer.step()
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total)
        return total.item() / counted.item()

    return step


def child(name, rank, store, dtype):
    """One rank: a step for every line read, its seconds, loss and peak memory as the answer."""
    import torch
    import torch.distributed as dist

    from shoal.train.display import peak_memory

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    step = stepper(name, rank, dtype)
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        loss = step(number)
        print(json.dumps([time.perf_counter() - began, loss, peak_memory("cpu")]), flush=True)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--only", nargs="*", default=list(CONTENDERS), help="names of the contenders to run")
    options.add_argument("--json", action="store_true")
    options.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child:
        name, rank, store, dtype = asked.child
        child(name, int(rank), store, dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        ranks = {
            name: [
                subprocess.Popen(
                    [sys.executable, __file__, "--child", name, str(rank), str(Path(folder, f"store{i}")), asked.dtype],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                for rank in range(RANKS)
            ]
            for i, name in enumerate(asked.only)
        }
        taken = {name: [] for name in asked.only}
        for number in range(asked.rounds + 2):
            order = list(ranks.items())
            random.Random(number).shuffle(order)  # whoever runs after another finds the machine as that one left it
            for name, pair in order:
                for process in pair:
                    print("step", file=process.stdin, flush=True)
                answers = [json.loads(process.stdout.readline()) for process in pair]
                if number > 1:  # two rounds to warm up
                    seconds, losses, memory = zip(*answers, strict=True)
                    taken[name].append((max(seconds), losses[0], max(memory)))
            print(f"round {number + 1} of {asked.rounds + 2}", file=sys.stderr)
        for pair in ranks.values():
            for process in pair:
                process.stdin.close()
                process.wait()
    report(taken, asked.json)


def report(taken, as_json):
    rows = []
    for name in taken:
        against = CONTENDERS[name] if CONTENDERS[name] in taken else None
        seconds = statistics.median(second for second, _, _ in taken[name])
        ratio = memory_ratio = None
        if against:
            ratio = statistics.median(b[0] / a[0] for a, b in zip(taken[name], taken[against], strict=True))
            memory_ratio = taken[name][-1][2] / taken[against][-1][2]
        rows.append(
            {
                "name": name,
                "tokens_per_s": BATCH * SEQUENCE / seconds,
                "speed_ratio": ratio,
                "peak_memory": taken[name][-1][2],
                "memory_ratio": memory_ratio,
                "loss": taken[name][-1][1],
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':42} {'tokens/s':>9} {'speed':>7} {'memory MiB':>11} {'memory':>7} {'last loss':>10}")
    for row in rows:
        ratios = [f"{row[key]:.2f}x" if row[key] else "" for key in ("speed_ratio", "memory_ratio")]
        print(
            f"{row['name']:42} {row['tokens_per_s']:9,.0f} {ratios[0]:>7} {row['peak_memory'] / 2**20:11,.0f} "
            f"{ratios[1]:>7} {row['loss']:10.6f}"
        )


if __name__ == "__main__":
    main()
