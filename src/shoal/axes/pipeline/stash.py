"""Versions of a chunk's weights, for schedules that update them while micro-batches are under way (spec PP-7).

The newest version lies where the parameters always lie, so that an optimizer updates it in place. An older one is a copy,
made just before the update that would destroy it, where somebody will still want it, and gone with the last who does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks


class Versions:
    """The versions of `parameters` in one step, numbered by the updates before them.

    sees: by micro-batch, the version that its forward and its backward use.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sees: Mapping[int, int]):
        self.parameters, self._wanted = parameters, dict(sees)
        self.sees = sees
        self._newest = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in parameters}  # by address
        self._copies: dict[int, dict[int, UntypedStorage]] = {}  # by version, by address of the original
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
                place = _place(data, data.untyped_storage().data_ptr())
                parameter.data = self._look(version, place, data.dtype)
        try:
            with saved_tensors_hooks(lambda x: self._pack(version, x), self._unpack):
                yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data

    def done(self, micro_batch: int) -> None:
        """The micro-batch's backward is complete."""
        version = self._wanted.pop(micro_batch)
        if version not in self._wanted.values():
            for storage in self._copies.pop(version, {}).values():
                del self._originals[storage.data_ptr()]

    def keep(self) -> None:
        """An update follows: keeps a copy of the newest version if a micro-batch that is not done sees it."""
        if self.newest in self._wanted.values():
            copied = {address: storage.clone() for address, storage in self._newest.items()}
            self._copies[self.newest] = copied
            self._originals |= {storage.data_ptr(): address for address, storage in copied.items()}
        self.newest += 1

    def _pack(self, version: int, x: Tensor) -> Any:
        """Autograd keeps x: where it is a view of weights, which version of them and where in it, instead of memory that
        an update may overwrite.
        """
        original = self._originals.get(x.untyped_storage().data_ptr())
        return x if original is None else _Saved(version, _place(x, original), x.dtype)

    def _unpack(self, packed: Any) -> Tensor:
        return self._look(packed.version, packed.place, packed.dtype) if isinstance(packed, _Saved) else packed

    def _look(self, version: int, place: "_Place", dtype: torch.dtype) -> Tensor:
        """What lies at a place of a version."""
        storage = (self._newest if version == self.newest else self._copies[version])[place.original]
        view = torch.empty(0, dtype=dtype, device=storage.device)
        return view.set_(storage, place.offset, place.size, place.stride)


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
    dtype: torch.dtype


def _place(x: Tensor, original: int) -> _Place:
    return _Place(original, int(x.storage_offset()), x.shape, x.stride())
