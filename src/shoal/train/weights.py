"""Whole weights out of a run: put together on one rank from the pieces that all keep, and written as one file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.axes.piece import Piece
from shoal.comm.collectives import gather
from shoal.comm.world import Group
from shoal.model.decoder import Decoder
from shoal.plan.pieces import pieces_of
from shoal.spec.inventory import buffers
from shoal.train.files import whole
from shoal.train.trainer import Trainer


@torch.no_grad()
def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter and buffer whole, by name, on the CPU of rank 0; nothing on the others, but all ranks call it.

    The ledger does not count what moves.
    """
    world, group = trainer.world, trainer.model_group
    takes_part = 0 in group.ranks
    holders = _holders(trainer) if takes_part else {}
    kept: dict[str, Tensor] = {}
    if takes_part or trainer.states.shared:
        for name, weight in trainer.states.weights():
            if takes_part and holders[name][group.index] is not None:
                kept[name] = weight.detach().clone()
    if not takes_part:
        return {}
    wholes: dict[str, Tensor] = {}
    with world.ledger.off():
        for name, pieces in holders.items():
            shapes = [None if piece is None else piece.shape for piece in pieces]
            if parts := _gathered(kept.pop(name, None), trainer.dtype, shapes, group):
                wholes[name] = _joined(pieces, parts)
        named = dict(trainer.model.named_buffers())
        for name, shape in buffers(trainer.job.model).items():
            routers = holders[name.replace("bias", "weight")]  # a bias lies where its router's weight does
            first = next(place for place, piece in enumerate(routers) if piece is not None)
            own = named[name] if group.index == first else None
            accurate = torch.promote_types(trainer.dtype, torch.float32)
            shapes = [shape if place == first else None for place in range(group.size)]
            if parts := _gathered(own, accurate, shapes, group):
                wholes[name] = parts[first].view(shape)
    return wholes


def _holders(trainer: Trainer) -> dict[str, list[Piece | None]]:
    """By parameter, for each rank of the model's group: the piece it brings; None where an earlier one brings the same."""
    ranks = trainer.model_group.ranks
    holders: dict[str, list[Piece | None]] = {}
    for place, rank in enumerate(ranks):
        for piece in pieces_of(trainer.job, rank):
            of_all = holders.setdefault(piece.parameter.name, [None] * len(ranks))
            if all(piece.runs != other.runs for other in of_all if other):
                of_all[place] = piece
    return holders


def _gathered(
    own: Tensor | None, dtype: torch.dtype, shapes: Sequence[Sequence[int] | None], group: Group
) -> list[Tensor]:
    """On the group's first rank what each of them brings, flat and on the CPU; nothing on the others."""
    sizes = [0 if shape is None else torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(0, dtype=dtype, device=group.device) if own is None else own.flatten()
    parts = gather(flat, group, root=0, sizes=sizes)
    return list(parts.cpu().split(sizes)) if group.index == 0 else []


def _joined(pieces: Sequence[Piece | None], parts: Sequence[Tensor]) -> Tensor:
    """One parameter out of the pieces of those that hold it."""
    first = next(piece for piece in pieces if piece is not None)
    whole = torch.empty(first.parameter.shape, dtype=parts[0].dtype)
    for piece, part in zip(pieces, parts, strict=True):
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
    with whole(path) as unfinished:
        save_file(weights, unfinished, metadata={"model": json.dumps(asdict(trainer.job.model))})
