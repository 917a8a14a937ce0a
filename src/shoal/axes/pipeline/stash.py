"""Versions of a chunk's weights, for schedules that update them while micro-batches are under way (spec PP-7).

The newest version lies where the parameters always lie, so that an optimizer updates it in place. An older one is a copy,
made just before the update that would destroy it, where somebody will still want it, and gone with the last who does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Versions:
    """The versions of `parameters` in one step, numbered by the updates before them.

    sees: by micro-batch, the version that its forward and its backward use.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sees: Mapping[int, int]):
        self.parameters, self._wanted = parameters, dict(sees)
        self.sees = sees
        self._newest = {_address(p): _everything(p.detach()) for p in parameters}  # by address
        self._copies: dict[int, dict[int, Tensor]] = {}  # by version, by address of the original
        self._originals = {address: address for address in self._newest}  # by address of whichever version
        self.newest = 0

    def __len__(self) -> int:
        """How many versions exist."""
        return 1 + len(self._copies)

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Inside, the parameters have the values that belong to the micro-batch, and so has what autograd saves of them."""
        version = self.sees[micro_batch]
        own = [parameter.data for parameter in self.parameters]
        if version != self.newest:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = self._look(version, _place(data, _address(data)))
        # torch asks only the innermost hooks, so what is not ours goes to those around
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(x: Tensor) -> Any:
            packed = self._pack(version, x)
            return outer[0](x) if outer and packed is x else packed

        def unpack(packed: Any) -> Tensor:
            return outer[1](packed) if outer and not isinstance(packed, _Saved) else self._unpack(packed)

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data

    def done(self, micro_batch: int) -> None:
        """The micro-batch's backward is complete."""
        version = self._wanted.pop(micro_batch)
        if version not in self._wanted.values():
            for copy in self._copies.pop(version, {}).values():
                del self._originals[_address(copy)]

    def keep(self) -> None:
        """An update follows: keeps a copy of the newest version if a micro-batch that is not done sees it."""
        if self.newest in self._wanted.values():
            copied = {address: newest.clone() for address, newest in self._newest.items()}
            self._copies[self.newest] = copied
            self._originals |= {_address(copy): address for address, copy in copied.items()}
        self.newest += 1

    def _pack(self, version: int, x: Tensor) -> Any:
        """Autograd keeps x: where it is a view of weights, which version of them and where in it, instead of memory that
        an update may overwrite.
        """
        original = self._originals.get(_address(x))
        return x if original is None else _Saved(version, _place(x, original))

    def _unpack(self, packed: Any) -> Tensor:
        return self._look(*packed) if isinstance(packed, _Saved) else packed

    def _look(self, version: int, place: "_Place") -> Tensor:
        """What lies at a place of a version."""
        memory = (self._newest if version == self.newest else self._copies[version])[place.original]
        return memory.as_strided(place.size, place.stride, place.offset)


class _Place(NamedTuple):
    """Where a tensor lies in a storage, which is known by the address of the newest version."""

    original: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Saved(NamedTuple):
    """A view of weights, as autograd keeps it here."""

    version: int
    place: _Place


def _address(x: Tensor) -> int:
    """What tells the memory that x is a view of from other memory."""
    return x.untyped_storage()._cdata


def _everything(x: Tensor) -> Tensor:
    """All of the memory that x is a view of, as one flat tensor."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _place(x: Tensor, original: int) -> _Place:
    return _Place(original, int(x.storage_offset()), x.shape, x.stride())
