"""What a rank's trainer has that a checkpoint must hold, in global names and coordinates, as views of where it lives.

weight/NAME    in float32 at least: of bfloat16 weights their masters, which determine them
moment1/NAME, moment2/NAME
buffer/NAME    what modules keep beside their parameters, such as a router's bias; whole on every rank that has it

Anything else a run needs is a function of the seed and the step: data order, dropout, learning rate.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from shoal.train.checkpoint.boxes import boxes, strides_of
from shoal.train.optimizer import located
from shoal.train.trainer import Trainer

Key = tuple[str, tuple[int, ...]]  # the name of a whole tensor, and where in it a part begins


class Part(NamedTuple):
    """A box of the whole tensor `name` of that shape, from `offsets` on; tensor: its values, a view."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> Key:
        return self.name, self.offsets


def key_of(index: MetadataIndex) -> Key:
    """The key in torch.distributed.checkpoint's words."""
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


def parts_of(trainer: Trainer) -> list[Part]:
    """Every part of every tensor that this rank has; ranks with the same part have it under the same key.

    The views stay valid: loading writes into them, `settle` follows.
    """
    return [*_parameters(trainer), *_buffers(trainer)]


def settle(trainer: Trainer, updates: int) -> None:
    """Makes a trainer whose parts were written go on after `updates` updates: weights follow masters, ranks each other."""
    trainer.optimizer.restored(updates)
    with trainer.world.ledger.off():
        trainer.states.spread()


def _parameters(trainer: Trainer) -> Iterator[Part]:
    pieces = {piece.parameter.name: piece for piece in trainer.pieces}
    for span, kept in located(trainer.states.held(), trainer.optimizer.kept()):
        piece = pieces[span.name]
        strides = strides_of(piece.shape)
        for box in boxes(piece, span.first, span.first + span.stop - span.start):
            for kind, run in kept.items():
                start = run.storage_offset() + span.start + box.at - span.first
                view = run.as_strided(box.sizes, strides, start)
                yield Part(f"{kind}/{span.name}", piece.parameter.shape, box.offsets, view)


def _buffers(trainer: Trainer) -> Iterator[Part]:
    parameters = {name for name, _ in trainer.model.named_parameters()}
    for name, buffer in trainer.model.state_dict(keep_vars=True).items():
        if name not in parameters:
            yield Part(f"buffer/{name}", tuple(buffer.shape), (0,) * buffer.dim(), buffer)
