"""Context parallelism on 2 and 4 ranks of this machine: every kind, against a plain all-gather in torch.

A small model whose time goes into attention: one sequence of 4096 tokens, hidden 128. The peers are the same decoder in
plain torch modules, each rank with a contiguous share of the tokens: keys and values are gathered over the ranks, gradients
of both reduce-scattered, and torch's attention gets a mask. "all-gather" masks all keys; "all-gather, own prefix" leaves
out those after its share, which halves the work, unevenly. torch's own `context_parallel` is tried first, and runs along
where it can. All start from the same weights and train on the same tokens with torch's fused AdamW.

    python benchmarks/peers_context.py [--rounds 10] [--sequence 4096] [--json]
    python benchmarks/peers_context.py --balance    # work of each rank: planned, and measured as seconds of computing
"""

import argparse
import sys
import time
from collections import defaultdict

from harness import Contender, main

SEQUENCE = 4096
PLAIN, ALONE = "plain torch, one process", "shoal, one process"
GATHER, PREFIX, TORCH = "all-gather", "all-gather, own prefix", "torch context_parallel"
KINDS = {2: ("zigzag", "ring", "striped", "ulysses", "allgather"), 4: ()}
KINDS[4] = (*KINDS[2], "hybrid,ulysses=2")


def contenders(sequence, torch_runs):
    table = {PLAIN: Contender(1, sequence), ALONE: Contender(1, sequence, (PLAIN,))}
    for ranks, kinds in KINDS.items():
        peers = [f"{peer}, {ranks} ranks" for peer in (GATHER, PREFIX, *([TORCH] if torch_runs else []))]
        table |= {peer: Contender(ranks, sequence, (PLAIN,)) for peer in peers}
        ring = f"shoal cp={ranks},cp_kind=ring"
        for kind in kinds:
            name = f"shoal cp={ranks},cp_kind={kind}"
            table[name] = Contender(ranks, sequence, (*peers, *([ring] if name != ring else [])))
    return table


def job(layout, sequence):
    from shoal.spec.job import DataSpec, Job, TrainSpec
    from shoal.spec.layout import Layout
    from shoal.spec.machine import Machine
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=2, hidden=128, heads=4, vocab=257, positions_max=sequence)
    train = TrainSpec(batch=1, warmup=0, schedule="constant", clip=0.0)
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=sequence), train)


def stepper(name, rank, options):
    if name.startswith("shoal"):
        trainer = shoal_trainer("" if name == ALONE else name.removeprefix("shoal "), rank, options.sequence)
        return lambda step: trainer.step(step).loss
    return plain(name, rank, job("", options.sequence))


def shoal_trainer(layout, rank, sequence):
    from shoal.comm.ledger import Ledger
    from shoal.comm.world import World
    from shoal.plan.pieces import mesh_of
    from shoal.train.trainer import Trainer
    from shoal.verify.trial import MadeUpBatches

    asked = job(layout, sequence)
    return Trainer(asked, World(mesh_of(asked), rank, Ledger()), MadeUpBatches(asked, 0))


def plain(name, rank, asked):
    """Steps of the plain model; its attention and its share of the tokens are those of `name`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from shoal.model.decoder import Decoder
    from shoal.model.init import initialise
    from shoal.verify.trial import MadeUpBatches
    from single import Plain, copy_weights

    whole = Decoder(asked.model)
    initialise(whole, asked.model, asked.train.seed)
    sequence = asked.data.sequence
    model = Plain(asked.model, sequence)
    copy_weights(whole, asked.model, model)
    ranks = dist.get_world_size()
    share = slice(rank * sequence // ranks, (rank + 1) * sequence // ranks)
    if name.startswith(GATHER):
        model.cos, model.sin = model.cos[share], model.sin[share]
        F.scaled_dot_product_attention = gathered(share, sequence, name.startswith(PREFIX))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=asked.train.learning_rate,
        betas=(asked.train.beta1, asked.train.beta2),
        eps=asked.train.eps,
        weight_decay=asked.train.weight_decay,
        fused=True,
    )
    batches = MadeUpBatches(asked, 0)

    def step(number):
        (batch,) = batches.batch(number)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        valid = int((targets >= 0).sum())
        optimizer.zero_grad()
        if name.startswith(TORCH):
            loss = torch_context_parallel(model, tokens, targets, valid)
        else:
            tokens, targets = tokens[:, share], targets[:, share]
            loss = model(tokens, targets) * int((targets >= 0).sum()) / valid
            loss.backward()
        loss = loss.detach()
        if ranks > 1:
            gradients = [p.grad for p in parameters]
            flat = torch._utils._flatten_dense_tensors([*gradients, loss[None]])
            dist.all_reduce(flat)
            *summed, loss = torch._utils._unflatten_dense_tensors(flat, [*gradients, loss[None]])
            torch._foreach_copy_(gradients, summed)
        optimizer.step()
        return loss.item()

    return step


def gathered(share, sequence, own_prefix):
    """Attention of a contiguous share of queries over the keys and values of all ranks."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    attention = F.scaled_dot_product_attention
    last = share.stop if own_prefix else sequence
    seen = torch.arange(share.start, share.stop)[:, None] >= torch.arange(last)

    class AllGather(torch.autograd.Function):
        """x (2, b, g, s / N, d) -> (N, 2, b, g, s / N, d)."""

        @staticmethod
        def forward(ctx, x):
            whole = x.new_empty((dist.get_world_size(), *x.shape))
            dist.all_gather_single(whole.view(-1), x.contiguous().view(-1))
            return whole

        @staticmethod
        def backward(ctx, gradient):
            mine = gradient.new_empty(gradient.shape[1:])
            dist.reduce_scatter_single(mine.view(-1), gradient.contiguous().view(-1))
            return mine

    def over_all(q, k, v, is_causal, enable_gqa):
        k, v = AllGather.apply(torch.stack((k, v))).movedim(0, 3).flatten(3, 4)[..., :last, :]
        return attention(q, k, v, attn_mask=seen)

    return over_all


def torch_context_parallel(model, tokens, targets, valid):
    """Forward and backward as torch's tutorial has them; the rank's part of the mean loss."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers = [tokens.clone(), targets.clone(), model.cos, model.sin]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0]):
        loss = model(*buffers[:2]) * int((buffers[1] >= 0).sum()) / valid
        loss.backward()
    return loss


def try_torch(rank, world):
    """None where torch's context_parallel runs, else what it said."""
    try:
        plain(f"{TORCH}, {world} ranks", rank, job("", 256))(0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def show_balance(sequence, steps):
    """Prints each rank's work over the mean, planned in pairs of query and key and measured in seconds of its kernels,
    and how long the ring takes over the mean if every step of it waits for its busiest rank.
    """
    from shoal.axes.context.cost import pairs
    from shoal.launch.pool import Pool
    from shoal.plan.traffic import crossing

    print(f"{'':32} {'work of each rank over the mean':36} {'step by step':>14}  seconds in kernels, of a step")
    with Pool(4) as pool:
        for ranks, kinds in KINDS.items():
            for kind in kinds:
                layout = f"cp={ranks},cp_kind={kind}"
                cut = crossing(job(layout, sequence))
                planned = [list(row) for row in pairs(cut) for _ in range(cut.across)]
                results = pool.run(computing, ranks, layout, sequence, steps)
                _line(f"{layout}, planned", planned)
                taken = [seconds for seconds, _ in results]
                kernels = sum(map(sum, taken)) / ranks
                _line("measured", taken, f"{kernels:.3f} of {max(wall for _, wall in results):.3f}")


def _line(name, table, end=""):
    mean = sum(map(sum, table)) / len(table)
    shares = " ".join(f"{sum(row) / mean:.3f}" for row in table)
    print(f"{name:>32} {shares:36} {sum(map(max, zip(*table, strict=True))) / mean:>14.3f}  {end}")


def computing(rank, world, layout, sequence, steps):
    """(seconds of this rank's attention kernels by step of the ring, seconds of a whole step), each per training step.

    Kernels' seconds are of the processor, so that ranks that share one do not count each other's.
    """
    import torch

    from shoal.axes.context import kernel
    from shoal.axes.context.run import View

    torch.set_num_threads(1)
    trainer = shoal_trainer(layout, rank, sequence)
    trainer.step(0)
    ring = max(1, trainer.model.crossing._ring.size)
    seconds, owner = defaultdict(float), [0]
    tiles = View.tiles

    def noted(self, of):
        owner[0] = (self._rank - of) % ring
        return tiles(self, of)

    def timed(function):
        def call(*arguments):
            began = time.thread_time()
            result = function(*arguments)
            seconds[owner[0]] += time.thread_time() - began
            return result

        return call

    View.tiles, kernel.forward, kernel.backward = noted, timed(kernel.forward), timed(kernel.backward)
    began = time.perf_counter()
    for step in range(steps):
        trainer.step(1 + step)
    wall = time.perf_counter() - began
    return [seconds[step] / steps for step in range(ring)], wall / steps


def options(parser):
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--balance", action="store_true", help="show each rank's work instead of speeds")


def run():
    given = argparse.ArgumentParser(add_help=False)
    options(given)
    given.add_argument("--rounds", type=int, default=5)
    asked, _ = given.parse_known_args()
    if asked.balance:
        show_balance(asked.sequence, asked.rounds)
        return
    refused = None
    if "--child" not in sys.argv:
        from shoal.launch.pool import Pool

        with Pool(2) as pool:
            refused = pool.run(try_torch, 2)[0]
        if refused:
            print(f"{TORCH} does not run here: {refused}", file=sys.stderr)
    main(__doc__, contenders(asked.sequence, not refused), stepper, options)


if __name__ == "__main__":
    run()
