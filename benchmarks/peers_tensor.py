"""Tensor and sequence parallelism against torch's DTensor on 2 ranks, and 1D against 2D on 4 ranks of this machine.

The peer is the same decoder written in plain torch modules and cut by `parallelize_module` as torch's own guide does it:
q, k, v, gate and up column-wise, out and down row-wise, the embedding over its rows, the head and the loss over the
vocabulary (`loss_parallel`); with sequence parallelism also `SequenceParallel` norms. All start from the same weights and
train on the same tokens with torch's fused AdamW.

    python benchmarks/peers_tensor.py [--rounds 15] [--vocab 257] [--json]
"""

from harness import Contender, main
from training import adamw, job_of, trainer_of

SEQUENCE, BATCH = 256, 8
TOKENS = SEQUENCE * BATCH
PLAIN, CUT, SEQUENCE_CUT = "plain torch, one process", "torch DTensor", "torch DTensor, sequence parallel"
ALONE = "shoal, one process"
CONTENDERS = {
    PLAIN: Contender(1, TOKENS),
    ALONE: Contender(1, TOKENS, (PLAIN,)),
    CUT: Contender(2, TOKENS, (PLAIN,)),
    "shoal tp=2": Contender(2, TOKENS, (CUT, ALONE)),
    SEQUENCE_CUT: Contender(2, TOKENS, (PLAIN,)),
    "shoal tp=2,sp": Contender(2, TOKENS, (SEQUENCE_CUT, ALONE)),
    "shoal tp=4": Contender(4, TOKENS),
    "shoal tp=2x2": Contender(4, TOKENS, ("shoal tp=4",)),
}


def job(layout, vocab):
    from shoal.spec.model import ModelSpec

    model = ModelSpec(layers=6, hidden=256, heads=8, vocab=vocab)
    return job_of(model, layout, SEQUENCE, BATCH)


def stepper(name, rank, options):
    if name.startswith("shoal"):
        asked = job("" if name == ALONE else name.removeprefix("shoal "), options.vocab)
        trainer = trainer_of(asked, rank)
        return lambda step: trainer.step(step).loss
    return plain(name, job("", options.vocab))


def plain(name, asked):
    import torch
    from torch.distributed.tensor.parallel import loss_parallel

    from shoal.model.decoder import Decoder
    from shoal.model.init import initialise
    from shoal.verify.trial import MadeUpBatches
    from single import Plain, copy_weights

    whole = Decoder(asked.model)
    initialise(whole, asked.model, asked.train.seed)
    model = Plain(asked.model, SEQUENCE)
    copy_weights(whole, asked.model, model)
    cut = name != PLAIN
    if cut:
        model = parallelized(model, sequence=name == SEQUENCE_CUT)
    optimizer = adamw(model, asked.train)
    batches = MadeUpBatches(asked, 0)

    def step(number):
        (batch,) = batches.batch(number)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        optimizer.zero_grad()
        if cut:
            with loss_parallel():
                loss = model(tokens, targets)
                loss.backward()
        else:
            loss = model(tokens, targets)
            loss.backward()
        optimizer.step()
        return loss.item() if not hasattr(loss, "full_tensor") else loss.full_tensor().item()

    return step


def parallelized(model, sequence):
    """The plan of torch's tutorial on tensor parallelism, for this model's names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    between = Shard(1) if sequence else Replicate()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    block = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    block |= {name: RowwiseParallel(output_layouts=between) for name in ("out", "down")}
    if sequence:
        # One gather behind each norm serves all column layers that follow it.
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        ends["norm"] = SequenceParallel()
        for norm in ("attention_norm", "mlp_norm"):
            block |= {f"{norm}.norm": SequenceParallel(), f"{norm}.gather": PrepareModuleInput(**gathered)}
    for layer in model.blocks:
        if sequence:
            layer.attention_norm, layer.mlp_norm = with_gather(layer.attention_norm), with_gather(layer.mlp_norm)
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, ends)
    return model


def with_gather(norm):
    """A norm and the place behind it where torch's PrepareModuleInput can gather."""
    from torch import nn

    pair = nn.Sequential()
    pair.add_module("norm", norm)
    pair.add_module("gather", nn.Identity())
    return pair


def options(parser):
    parser.add_argument("--vocab", type=int, default=257)


if __name__ == "__main__":
    main(__doc__, CONTENDERS, stepper, options)
