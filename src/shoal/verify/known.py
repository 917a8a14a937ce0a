"""Values of integers among tensors that have none: where a dry run's experts get their tokens from.

In a FakeTensorMode a routing would have shapes alone, and those of what follows depend on its values. So integers that
come from integers alone are computed beside the tensors that stand for them; a choice of the largest falls evenly, and
other ranks are taken to do what this one does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 2**24  # elements; larger tensors of integers, such as masks, decide no shapes

aten, c10d = torch.ops.aten, torch.ops.c10d


class Known:
    """Follows integers through torch's operators. To be asked inside a TorchDispatchMode that is inside a FakeTensorMode."""

    def __init__(self) -> None:
        self._values = WeakIdKeyDictionary()

    def value(self, x: Tensor) -> Tensor | None:
        """What x holds, as a tensor that has values; None where that is not known."""
        if isinstance(x, FakeTensor):
            return self._values.get(x)
        return x if _whole(x) else None

    def array(self, x: Tensor) -> np.ndarray | None:
        """The same as an array."""
        value = self.value(x)
        with unset_fake_temporarily():
            return None if value is None else value.numpy().copy()

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """func(*args, **kwargs) as the FakeTensorMode answers it, and with the values known where there are any."""
        if func.namespace == "c10d":
            result = func(*args, **kwargs)
            self._travel(func, args)
            return result
        if func is aten.topk.default:
            values, chosen = func(*args, **kwargs)
            self._note(chosen, lambda: evenly(chosen.shape, args[0].shape[-1]))
            return values, chosen
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(self.value(x) is not None for x in given) or torch.Tag.nondeterministic_seeded in func.tags:
            self._forget(func, args)
            return func(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            real = self._really(func, args, kwargs)
            mode = next(x.fake_mode for x in given if isinstance(x, FakeTensor))
            result = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, real)
        else:
            result = func(*args, **kwargs)
            if not any(_whole(x) for x in tree_leaves(result) if isinstance(x, Tensor)):
                return result
            real = self._really(func, args, kwargs)
        for x, value in zip(tree_leaves(result), tree_leaves(real), strict=True):
            if isinstance(x, Tensor) and _whole(x):
                self._values[x] = value
        return result

    def _really(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with unset_fake_temporarily():
            return func(*self._with_values(args), **self._with_values(kwargs))

    def _with_values(self, arguments: Any) -> Any:
        return tree_map(lambda x: self.value(x) if isinstance(x, Tensor) else x, arguments)

    def _note(self, x: Tensor, make: Any) -> None:
        with unset_fake_temporarily():
            self._values[x] = make()

    def _forget(self, func: Any, args: Sequence[Any]) -> None:
        """What an operator writes into with what is not known is known no longer."""
        for declared, x in zip(func._schema.arguments, args, strict=False):
            if isinstance(x, Tensor) and declared.alias_info is not None and declared.alias_info.is_write:
                self._values.pop(x, None)

    def _travel(self, func: Any, args: Sequence[Any]) -> None:
        """What arrives by a collective of integers if every rank sends what this one sends."""
        if func not in (c10d.alltoall_base_.default, c10d._allgather_base_.default):
            return
        arriving, leaving, group = args[:3]
        sent, came = self.value(leaving), self.value(arriving)
        if sent is None or came is None:
            return
        group = dist.ProcessGroup.unbox(group)
        lengths, own = [len(arriving) // group.size()] * group.size(), slice(None)
        if func is c10d.alltoall_base_.default:
            lengths = args[3] or lengths
            cuts = args[4] or [len(leaving) // group.size()] * group.size()
            start = sum(cuts[: group.rank()])
            own = slice(start, start + cuts[group.rank()])
        with unset_fake_temporarily():
            piece = sent[own]
            came.copy_(torch.cat([resized(piece, length) for length in lengths]))  # which may be a view of another


def evenly(shape: Sequence[int], number: int) -> Tensor:
    """A choice, for each of T rows, of k of `number`, (..., k): row t takes t, t + number / k, and so on around."""
    rows, k = torch.Size(shape[:-1]).numel(), shape[-1]
    steps = torch.arange(k) * number // max(1, k)
    return ((torch.arange(rows)[:, None] + steps) % number).view(*shape)


def resized(piece: Tensor, length: int) -> Tensor:
    """A piece along dim 0 as a rank has it that has `length` of it: cut off, or begun again."""
    return (
        piece[torch.arange(length) % max(1, len(piece))] if len(piece) else piece.new_zeros((length, *piece.shape[1:]))
    )


def _whole(x: Tensor) -> bool:
    """Whether x holds integers or truth values, and not too many."""
    return not (x.is_floating_point() or x.is_complex()) and x.numel() <= LARGEST
