"""Whole weights out of a run: put together on one rank from the pieces that all keep, and written as one file."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.comm.collectives import gather
from shoal.model.decoder import Decoder
from shoal.plan.pieces import pieces_of
from shoal.train.files import removed, room_in
from shoal.train.trainer import Trainer


@torch.no_grad()
def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter whole, by name, on the CPU of rank 0; nothing on the others, but all ranks call it.

    The ledger does not count what moves.
    """
    world, group = trainer.world, trainer.model_group
    leads, takes_part = world.rank == 0, 0 in group.ranks
    kept: dict[str, Tensor] = {}
    if takes_part or trainer.states.shared:
        for name, weight in trainer.states.weights():
            if takes_part:
                kept[name] = weight.detach().clone()
    if not takes_part:
        return {}
    pieces = [{piece.parameter.name: piece for piece in pieces_of(trainer.job, rank)} for rank in group.ranks]
    wholes: dict[str, Tensor] = {}
    with world.ledger.off():
        for name in dict.fromkeys(name for of_rank in pieces for name in of_rank):
            holders = [of_rank.get(name) for of_rank in pieces]
            sizes = [0 if piece is None else torch.Size(piece.shape).numel() for piece in holders]
            own = kept.pop(name).flatten() if name in kept else next(iter(trainer.model.parameters())).new_empty(0)
            parts = gather(own, group, root=0, sizes=sizes)
            if leads:
                wholes[name] = _joined(holders, parts.cpu().split(sizes))
    return wholes


def _joined(holders, parts) -> Tensor:
    """One parameter out of the pieces of those that hold it."""
    first = next(piece for piece in holders if piece is not None)
    whole = torch.empty(first.parameter.shape, dtype=parts[0].dtype)
    for piece, part in zip(holders, parts, strict=True):
        if piece is not None:
            piece.put(part.view(piece.shape), whole)
    return whole


def one_process(trainer: Trainer, weights: dict[str, Tensor]) -> Decoder:
    """The decoder as one process has it, on this rank's device."""
    model = Decoder(trainer.job.model, trainer.dtype, trainer.world.device)
    model.load_state_dict(weights)
    return model


def save_weights(trainer: Trainer, weights: dict[str, Tensor], path: Path) -> None:
    """Writes parameters under their own names as safetensors; a killed save leaves the old file, if any."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with room_in(path.parent), removed(unfinished):
        save_file(weights, unfinished, metadata={"model": json.dumps(asdict(trainer.job.model))})
        unfinished.replace(path)
