"""What the benchmarks of training have in common: a job on made-up tokens, shoal's trainer, and the optimizer of the peers."""


def job_of(model, layout, sequence, batch, **train):
    """A Job that trains `model` at a constant rate without clipping. batch: sequences; train: other fields of it."""
    from shoal.spec.job import DataSpec, Job, TrainSpec
    from shoal.spec.layout import Layout
    from shoal.spec.machine import Machine

    training = TrainSpec(batch=batch, warmup=0, schedule="constant", clip=0.0, **train)
    return Job(model, Layout.parse(layout), Machine(), DataSpec(sequence=sequence), training)


def trainer_of(job, rank):
    """shoal's Trainer of a job on `rank`, once torch.distributed is initialised."""
    from shoal.comm.ledger import Ledger
    from shoal.comm.world import World
    from shoal.plan.pieces import mesh_of
    from shoal.train.trainer import Trainer
    from shoal.verify.trial import MadeUpBatches

    mesh = mesh_of(job)
    return Trainer(job, World(mesh, rank, Ledger()), MadeUpBatches(job, mesh.coordinate("dp", rank)))


def adamw(model, train, optimizer=None, **options):
    """torch's fused AdamW as shoal's own is, without decay of vectors. optimizer: another class, with its options."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return (optimizer or torch.optim.AdamW)(
        groups,
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
        **options,
    )


def averaged_step(batches, loss_of, optimizer, ranks, corrected=lambda: None):
    """A function that trains on step number n, where the peers average gradients over `ranks`; it returns the mean loss.

    loss_of(tokens, targets): the sum over this rank's tokens. corrected: is called between backward and update.
    """
    import torch
    import torch.distributed as dist

    def step(number):
        (batch,) = batches.batch(number)
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        counted = torch.tensor([float((targets >= 0).sum())])
        dist.all_reduce(counted)
        loss = loss_of(tokens, targets)
        optimizer.zero_grad()
        (loss * (ranks / counted.item())).backward()
        corrected()
        optimizer.step()
        total = loss.detach().double().reshape(1)
        dist.all_reduce(total)
        return total.item() / counted.item()

    return step
