"""Fresh weights as a function of (seed, name, row): every layout and every dtype starts from the same numbers.

Rows are drawn in blocks, each from a stream of its own, so a rank draws the rows that it keeps and no others. Values
are float32 from the CPU, cast to the parameter's dtype.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from shoal.axes.piece import Piece, everything
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec

_BLOCK = 64  # rows of one stream; of experts, whose rows are matrices, one


@torch.no_grad()
def initialise(module: nn.Module, spec: ModelSpec, seed: int, pieces: Sequence[Piece] | None = None) -> None:
    """Fills every parameter of a Decoder built from `spec` as the inventory says; its buffers with zeros.

    pieces: what this rank keeps of each parameter, by default all of it; padding becomes zero.
    """
    for buffer in module.buffers():
        buffer.zero_()
    parameters = dict(module.named_parameters())
    for piece in pieces if pieces is not None else map(everything, inventory(spec)):
        entry = piece.parameter
        parameter = parameters.pop(entry.name)
        assert parameter.shape == piece.shape, f"{entry.name} is {tuple(parameter.shape)}, not {piece.shape}"
        parameter.zero_()
        if entry.init != "normal":
            parameter.fill_(1 if entry.init == "ones" else 0)
            continue
        for run in piece.runs[0]:
            step = _block_rows(entry.shape)
            for start in range(run.start, run.stop, step):
                stop = min(start + step, run.stop)
                drawn = rows(entry.name, entry.shape, entry.std, seed, start, stop)
                here = slice(run.at + start - run.start, run.at + stop - run.start)
                for there, columns in Piece(entry, piece.shape[1:], piece.runs[1:]).blocks():
                    parameter[(here, *columns)] = drawn[(slice(None), *there)].to(parameter)
    assert not parameters, f"not in the inventory: {', '.join(parameters)}"


def rows(name: str, shape: Sequence[int], std: float, seed: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the fresh parameter `name` of that whole shape: float32, normal with the deviation std."""
    step = _block_rows(shape)
    first = start // step
    drawn = [_block(name, shape, seed, block) for block in range(first, -(-stop // step))]
    origin = first * step
    drawn.append(np.empty((0, *shape[1:]), np.float32))  # so that no rows are rows as well
    return torch.from_numpy(np.concatenate(drawn)[start - origin : stop - origin] * np.float32(std))


def _block(name: str, shape: Sequence[int], seed: int, block: int) -> np.ndarray:
    """The block's standard normal rows. Its stream's key is a blake2b hash: Python's own differs between processes."""
    key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype=np.uint64)))
    step = _block_rows(shape)
    count = min(step, shape[0] - block * step)
    return random.standard_normal((count, *shape[1:]), dtype=np.float32)


def _block_rows(shape: Sequence[int]) -> int:
    return _BLOCK if len(shape) < 3 else 1
