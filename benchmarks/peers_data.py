"""Data parallelism and ZeRO against torch's own: DDP, ZeroRedundancyOptimizer, FSDP2, on 2 ranks of this machine.

Every contender trains the same decoder (shoal's) in the same dtype on the same tokens.

    python benchmarks/peers_data.py [--rounds 15] [--dtype float32|bfloat16] [--json]
"""

from harness import Contender, main

RANKS = 2
SEQUENCE, BATCH = 256, 8  # of both ranks together
DDP, REDUNDANCY = "torch DDP", "torch DDP + ZeroRedundancyOptimizer"
KEEPING, FSDP = "torch FSDP2, reshard_after_forward=False", "torch FSDP2"
CONTENDERS = {
    name: Contender(RANKS, SEQUENCE * BATCH, against)
    for name, against in {
        DDP: (),
        "shoal dp=2": (DDP,),
        REDUNDANCY: (),
        "shoal zero=1": (REDUNDANCY,),
        KEEPING: (),
        "shoal zero=2": (KEEPING,),
        FSDP: (),
        "shoal zero=3": (FSDP,),
    }.items()
}


def job(dtype, layout):
    from shoal.spec.job import DataSpec, Job, TrainSpec
    from shoal.spec.layout import Layout
    from shoal.spec.machine import Machine
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=6, hidden=256, heads=4, vocab=257)
    train = TrainSpec(batch=BATCH, dtype=dtype, warmup=0, schedule="constant", clip=0.0)
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=SEQUENCE), train)


def stepper(name, rank, options):
    """A function that trains on step number n and returns the loss of this rank's part."""
    from shoal.comm.ledger import Ledger
    from shoal.comm.world import World
    from shoal.mesh import Mesh
    from shoal.train.trainer import Trainer
    from shoal.verify.trial import MadeUpBatches

    if name.startswith("shoal"):
        layout = "dp=2" if name == "shoal dp=2" else f"dp=2,{name.removeprefix('shoal ')}"
        asked = job(options.dtype, layout)
        trainer = Trainer(asked, World(Mesh.of(asked.layout), rank, Ledger()), MadeUpBatches(asked, rank))
        return lambda step: trainer.step(step).loss
    return peer(name, rank, job(options.dtype, "dp=2"))


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


def options(parser):
    parser.add_argument("--dtype", default="float32")


if __name__ == "__main__":
    main(__doc__, CONTENDERS, stepper, options)
