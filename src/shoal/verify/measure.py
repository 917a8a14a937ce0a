"""What a rank really holds while it trains, by the categories of plan/memory.py: each storage counts once, in bytes."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shoal.axes.zero.run import ZeRO
from shoal.kernels.linear import PutOff
from shoal.train.trainer import Trainer


def measured_step(trainer: Trainer, step: int) -> dict[str, int]:
    """Trains one step and returns the most bytes held meanwhile, by category.

    weights, gradients and optimizer are those between steps. activations: what autograd keeps for backward, and what waits
    with weight gradients that were put off; not weights, of which autograd keeps views.
    """
    kept = Kept(trainer.model.parameters())
    with kept.watching(), kept.putting_off(trainer):
        trainer.step(step)
    return {**held(trainer), "activations": kept.peak}


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of a trainer's states between steps, and the most of what ZeRO puts together meanwhile."""
    states = trainer.states
    parts = states.parts if isinstance(states, ZeRO) else states.buckets
    found = {
        "weights": _bytes([part.weights for part in parts]),
        "gradients": _bytes([part.gradients for part in parts]),
        "optimizer": trainer.optimizer.state_bytes(),
    }
    if isinstance(states, ZeRO):
        found |= {category: states.memory.peak[category] for category in ("gathered", "buckets")}
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


class Kept:
    """Bytes kept from forward to backward, now and at most. weights: tensors whose storages do not count."""

    def __init__(self, weights: Iterable[Tensor]):
        self.now = self.peak = 0
        self._uses: Counter[int] = Counter()  # of a storage, by its address
        self._weights = {weight.untyped_storage()._cdata for weight in weights}

    def watching(self) -> saved_tensors_hooks:
        """Inside, what autograd saves is counted, until it is gone."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def putting_off(self, trainer: Trainer) -> Iterator[None]:
        """Inside, what waits with weight gradients that a pipeline put off is counted, until they are made."""
        queues = trainer.pipeline.engine.queues.values() if trainer.pipeline else []
        for queue in queues:
            queue.take = partial(self._taken, queue.take)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for queue in queues:
                del queue.take  # the class's own is back

    def _taken(self, take: Callable[[], PutOff]) -> PutOff:
        taken = take()
        weakref.finalize(taken, list[_Counted].clear, [_Counted(x, self) for x in taken.inputs()])
        return taken

    def _pack(self, x: Tensor) -> "Tensor | _Counted":
        return x if x.untyped_storage()._cdata in self._weights else _Counted(x, self)

    @staticmethod
    def _unpack(packed: "Tensor | _Counted") -> Tensor:
        return packed.tensor if isinstance(packed, _Counted) else packed


class _Counted:
    """A tensor in whose storage something that backward needs lies, as long as this object lives."""

    def __init__(self, tensor: Tensor, kept: Kept):
        self.tensor, self._kept = tensor, kept
        storage = tensor.untyped_storage()
        self._key, self._size = storage._cdata, storage.nbytes()
        if not kept._uses[self._key]:
            kept.now += self._size
            kept.peak = max(kept.peak, kept.now)
        kept._uses[self._key] += 1

    def __del__(self) -> None:
        self._kept._uses[self._key] -= 1
        if not self._kept._uses[self._key]:
            del self._kept._uses[self._key]
            self._kept.now -= self._size
