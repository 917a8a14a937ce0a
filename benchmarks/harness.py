"""Runs contenders side by side: each in processes of its own, one thread per rank, all stepping in turn, round after round.

Each round has another order, so that a machine whose speed drifts drifts for all. A benchmark hands `main` its contenders
and a function that makes one: `stepper(name, rank)` returns a function of the step's number that trains and returns the loss.
Figures are medians of step time, tokens per second of all ranks together, the median of the ratios round by round, and the
peak memory of a rank's process. Losses after the last step are shown too: equal mathematics gives equal losses.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Contender:
    """ranks: processes. against: names of those it is held against. tokens: of one step, all ranks together."""

    ranks: int
    tokens: int
    against: tuple[str, ...] = ()


Stepper = Callable[[str, int, argparse.Namespace], Callable[[int], float]]


def main(
    description: str,
    contenders: Mapping[str, Contender],
    stepper: Stepper,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The whole command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=list(contenders), help="names of the contenders to run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    add_options(parser)
    asked = parser.parse_args()
    if asked.child:
        name, rank, store = asked.child
        _child(name, int(rank), store, contenders[name].ranks, stepper, asked)
        return
    taken = _rounds({name: contenders[name] for name in asked.only}, asked.rounds)
    _report(taken, contenders, asked.json)


def _child(name, rank, store, ranks, stepper, asked):
    """One rank: a step for every line read, its seconds, loss and peak memory as the answer."""
    import torch
    import torch.distributed as dist

    from shoal.train.display import peak_memory

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    step = stepper(name, rank, asked)
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        loss = step(number)
        print(json.dumps([time.perf_counter() - began, loss, peak_memory("cpu")]), flush=True)


def _rounds(contenders, rounds):
    """Per contender, per round: (seconds of the slowest rank, loss, peak memory of the largest rank)."""
    taken = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        ranks = {
            name: [
                subprocess.Popen(
                    [sys.executable, *sys.argv, "--child", name, str(rank), str(Path(folder, f"store{i}"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                for rank in range(contender.ranks)
            ]
            for i, (name, contender) in enumerate(contenders.items())
        }
        for number in range(rounds + WARM_UP):
            order = list(ranks.items())
            random.Random(number).shuffle(order)  # whoever runs after another finds the machine as that one left it
            for name, processes in order:
                for process in processes:
                    print("step", file=process.stdin, flush=True)
                answers = [json.loads(process.stdout.readline()) for process in processes]
                if number >= WARM_UP:
                    seconds, losses, memory = zip(*answers, strict=True)
                    taken[name].append((max(seconds), losses[0], max(memory)))
            print(f"round {number + 1} of {rounds + WARM_UP}", file=sys.stderr)
        for processes in ranks.values():
            for process in processes:
                process.stdin.close()
                process.wait()
    return taken


def _report(taken, contenders, as_json):
    rows = []
    for name, rounds in taken.items():
        seconds = statistics.median(second for second, _, _ in rounds)
        peers = [peer for peer in contenders[name].against if peer in taken]
        row = {
            "name": name,
            "tokens_per_s": contenders[name].tokens / seconds,
            "peak_memory": rounds[-1][2],
            "loss": rounds[-1][1],
            "speed_ratios": {
                peer: statistics.median(b[0] / a[0] for a, b in zip(rounds, taken[peer], strict=True)) for peer in peers
            },
            "memory_ratios": {peer: rounds[-1][2] / taken[peer][-1][2] for peer in peers},
        }
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max(map(len, taken)) + 2
    print(f"{'':{width}} {'tokens/s':>9} {'memory MiB':>11} {'last loss':>10}  speed and memory against")
    for row in rows:
        ratios = [
            f"{row['speed_ratios'][peer]:.2f}x, {row['memory_ratios'][peer]:.2f}x {peer}"
            for peer in row["speed_ratios"]
        ]
        print(
            f"{row['name']:{width}} {row['tokens_per_s']:9,.0f} {row['peak_memory'] / 2**20:11,.0f} "
            f"{row['loss']:10.6f}  {'; '.join(ratios)}"
        )
