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
from unittest.mock import patch

from harness import Contender, main
from training import adamw, job_of, trainer_of

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
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=2, hidden=128, heads=4, vocab=257, positions_max=sequence)
    return job_of(model, layout, sequence, batch=1)


def stepper(name, rank, options):
    if name.startswith("shoal"):
        trainer = trainer_of(job("" if name == ALONE else name.removeprefix("shoal "), options.sequence), rank)
        return lambda step: trainer.step(step).loss
    return plain(name, rank, job("", options.sequence))


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
    attention = F.scaled_dot_product_attention
    if name.startswith(GATHER):
        model.cos, model.sin = model.cos[share], model.sin[share]
        attention = gathered(share, sequence, name.startswith(PREFIX))
    optimizer = adamw(model, asked.train)
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
            with patch.object(F, "scaled_dot_product_attention", attention):
                loss = model(tokens, targets) * int((targets >= 0).sum()) / valid
            loss.backward()
        loss = loss.detach()
        if ranks > 1:
            gradients = [p.grad for p in model.parameters()]
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
    """Prints, for every contender, each rank's part of the work: see the columns' names below.

    Seconds are of the processor, in one training step, so that ranks that share a core do not count each other's.
    """
    from shoal.axes.context.cost import pairs
    from shoal.launch.pool import Pool
    from shoal.plan.traffic import crossing

    print(
        "seconds: of the processor, in a step, by rank; attention: what its kernels take of them, by rank, over their"
    )
    print(
        "mean, and as planned in pairs of query and key; steps: as long as each step of the ring's busiest rank, over the mean"
    )
    with Pool(4) as pool:
        for name, contender in contenders(sequence, torch_runs=False).items():
            results = pool.run(computing, contender.ranks, name, sequence, steps)
            print(f"{name:36} seconds   {' '.join(f'{seconds:.3f}' for seconds, _ in results)}")
            if "cp=" in name:
                cut = crossing(job(name.removeprefix("shoal "), sequence))
                _line("planned", [row for row in pairs(cut).tolist() for _ in range(cut.across)])
                _line("measured", [kernels for _, kernels in results])


def _line(name, table):
    mean = sum(map(sum, table)) / len(table)
    table = [[work / mean for work in row] for row in table if any(row)]
    print(f"{'':36} attention {' '.join(f'{sum(row):.3f}' for row in table)}, {name}", end="")
    if any(any(row[1:]) for row in table):
        by_step = " | ".join(" ".join(f"{work:.2f}" for work in row) for row in table)
        print(f"; by step {by_step}; steps {sum(map(max, zip(*table, strict=True))):.3f}", end="")
    print()


def computing(rank, world, name, sequence, steps):
    """(seconds of one step, those of the attention kernels by step of the ring) of this rank's processor, per step."""
    import torch

    from shoal.axes.context import kernel
    from shoal.axes.context.run import View

    torch.set_num_threads(1)
    step = stepper(name, rank, argparse.Namespace(sequence=sequence))
    step(0)
    seconds, at = defaultdict(float), [0]
    tiles = View.tiles

    def noted(self, owner):
        at[0] = (self._rank - owner) % len(self._shares)
        return tiles(self, owner)

    def timed(function):
        def call(*arguments):
            began = time.thread_time()
            result = function(*arguments)
            seconds[at[0]] += (time.thread_time() - began) / steps
            return result

        return call

    with (
        patch.object(View, "tiles", noted),
        patch.object(kernel, "forward", timed(kernel.forward)),
        patch.object(kernel, "backward", timed(kernel.backward)),
    ):
        began = time.process_time()
        for number in range(steps):
            step(1 + number)
        whole = (time.process_time() - began) / steps
    return whole, [seconds[place] for place in range(world)]


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
