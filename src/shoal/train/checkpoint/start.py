"""Starts a run from whole weights, such as a run's model.safetensors or what `shoal convert` makes of a checkpoint."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shoal.spec.errors import RequestError
from shoal.train.checkpoint.state import parts_of, settle
from shoal.train.data.naming import named
from shoal.train.trainer import Trainer


@torch.no_grad()
def start_from(trainer: Trainer, path: Path) -> None:
    """Gives a fresh trainer the weights of a safetensors file, cast to its own type; each rank reads its parts of them.

    Names and shapes are the inventory's; buffers are taken where the file has them. Raises RequestError naming
    train.weights.
    """
    given = f"train.weights = {named(path)}"
    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            for part in parts_of(trainer):
                kind, _, name = part.name.partition("/")
                if kind.startswith("moment") or (kind == "buffer" and name not in there):
                    continue
                if name not in there:
                    raise RequestError(
                        "train.weights",
                        f"{given} has no {name}; the weights of this model, under shoal's names, would do",
                    )
                stored = file.get_slice(name)
                if tuple(stored.get_shape()) != part.shape:
                    raise RequestError(
                        "train.weights",
                        f"{given} has a {name} of {tuple(stored.get_shape())}, not {part.shape}; the weights of this model "
                        "would do",
                    )
                box = zip(part.offsets, part.tensor.shape, strict=True)
                part.tensor.copy_(stored[tuple(slice(start, start + size) for start, size in box)])
    except (OSError, SafetensorError):
        raise RequestError(
            "train.weights", f"{given} is no safetensors file, or a damaged one; a run's model.safetensors would do"
        ) from None
    settle(trainer, updates=0)
