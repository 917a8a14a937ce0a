"""Data parallelism and ZeRO against torch's own: DDP, ZeroRedundancyOptimizer, FSDP2, on 2 ranks of this machine.

Every contender trains the same decoder (shoal's) in the same dtype on the same tokens.

    python benchmarks/peers_data.py [--rounds 15] [--dtype float32|bfloat16] [--json]
"""

from harness import Contender, main
from training import adamw, averaged_step, job_of, trainer_of

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
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=6, hidden=256, heads=4, vocab=257)
    return job_of(model, layout, SEQUENCE, BATCH, dtype=dtype)


def stepper(name, rank, options):
    """A function that trains on step number n and returns the loss of this rank's part."""
    if name.startswith("shoal"):
        layout = "dp=2" if name == "shoal dp=2" else f"dp=2,{name.removeprefix('shoal ')}"
        asked = job(options.dtype, layout)
        trainer = trainer_of(asked, rank)
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
    if "Redundancy" in name:
        whole_states = {"optimizer": ZeroRedundancyOptimizer, "optimizer_class": torch.optim.AdamW}
        optimizer = adamw(model, asked.train, **whole_states, parameters_as_bucket_view=True)
    else:
        optimizer = adamw(model, asked.train)
    return averaged_step(MadeUpBatches(asked, rank), model, optimizer, RANKS)


def options(parser):
    parser.add_argument("--dtype", default="float32")


if __name__ == "__main__":
    main(__doc__, CONTENDERS, stepper, options)
