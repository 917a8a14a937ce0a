"""What a rank really holds while it trains, by the categories of plan/memory.py: each storage counts once, in bytes."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket
from shoal.axes.zero.part import Part
from shoal.axes.zero.run import ZeRO
from shoal.kernels.linear import PutOff
from shoal.train.states import Together
from shoal.train.trainer import Trainer


def measured_step(trainer: Trainer, step: int) -> dict[str, int]:
    """Trains one step and returns the most bytes held meanwhile, by category.

    weights, gradients and optimizer are those between steps. activations: what autograd keeps for backward, and what waits
    with weight gradients that were put off; not weights, of which autograd keeps views.
    """
    kept = Kept(trainer.model.parameters())
    with kept.watching(trainer):
        trainer.step(step)
    return {**held(trainer), "activations": kept.peak}


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of a trainer's states between steps, and the most of what ZeRO puts together meanwhile."""
    states = trainer.states.states if isinstance(trainer.states, Together) else [trainer.states]
    parts: list[Part | Bucket] = []
    for each in states:
        assert isinstance(each, ZeRO | DataParallel)
        parts += each.parts if isinstance(each, ZeRO) else each.buckets
    found = {
        "weights": _bytes([part.weights for part in parts]),
        "gradients": _bytes([part.gradients for part in parts]),
        "optimizer": trainer.optimizer.state_bytes(),
    }
    for category in ("gathered", "buckets"):
        found[category] = sum(each.memory.peak[category] for each in states if isinstance(each, ZeRO))
    ran = trainer.pipeline.ran if trainer.pipeline else None
    found["versions"] = (max(ran.versions.values(), default=1) - 1) * found["weights"] if ran else 0
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


class Kept:
    """Bytes kept from forward to backward, now and at most. weights: tensors whose storages do not count."""

    def __init__(self, weights: Iterable[Tensor]):
        self.now = self.peak = 0
        self._uses: Counter[int] = Counter()  # of a storage, by its address
        self._fresh: list[_Waiting] = []
        self._other = {weight.untyped_storage()._cdata for weight in weights}

    @contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Inside, everything that is kept for a backward of the trainer is counted, until it is gone."""
        queues = list(trainer.pipeline.engine.queues.values()) if trainer.pipeline else []
        with ExitStack() as stack:
            for block in trainer.model.blocks.values():
                stack.enter_context(_removed(block.register_forward_pre_hook(self._shared)))
            for queue in queues:
                queue.add = partial(self._put_off, queue.add)  # type: ignore[method-assign]
                queue.take = partial(self._taken, queue.take)  # type: ignore[method-assign]
                for name in ("add", "take"):
                    stack.callback(delattr, queue, name)  # the class's own is back
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            yield

    def _shared(self, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        """What a block gets beside its input belongs to all of the micro-batch's blocks."""
        for x in tree_leaves(arguments[1:]):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self._other:
                self._other.add(key)
                weakref.finalize(x.untyped_storage(), self._other.discard, key)  # the address may be used again

    def _put_off(
        self, add: Callable[..., None], parameter: Tensor, compute: Callable[..., Tensor], *inputs: Tensor
    ) -> None:
        waiting = _Waiting(compute, inputs)
        self._fresh.append(waiting)
        add(parameter, waiting, *inputs)

    def _taken(self, take: Callable[[], PutOff]) -> PutOff:
        self._settle()
        return take()

    def _settle(self) -> None:
        """Counts what has been put off since; not at once, as what it stands for in the graph is gone only after its block."""
        for waiting in self._fresh:
            waiting.counted = [_Counted(x, self) for x in waiting.inputs]
        self._fresh = []

    def _pack(self, x: Tensor) -> "Tensor | _Counted":
        self._settle()
        return x if x.untyped_storage()._cdata in self._other else _Counted(x, self)

    @staticmethod
    def _unpack(packed: "Tensor | _Counted") -> Tensor:
        return packed.tensor if isinstance(packed, _Counted) else packed


class _Waiting:
    """A gradient that was put off; what it needs counts until it is made."""

    def __init__(self, compute: Callable[..., Tensor], inputs: Sequence[Tensor]):
        self.compute, self.inputs, self.counted = compute, inputs, list[_Counted]()

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.inputs, self.counted = (), []
        return self.compute(*inputs)


@contextmanager
def _removed(hook: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


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
