"""torch.distributed.checkpoint's storage: a safetensors file per rank, and index.json written last."""

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shoal.comm.whereabouts import NOWHERE, Nowhere
from shoal.train.checkpoint.folder import begin, commit, opened, prune, unfinished
from shoal.train.checkpoint.index import WIDTHS, Chunk, File, Index, Stored, write_index
from shoal.train.checkpoint.state import Key, key_of
from shoal.train.checkpoint.tensors import DTYPES, NAMES, Entry, Lies, read_tensor, write_tensors

Describe = Callable[[tuple[File, ...], dict[str, Stored]], Index]


class Writer(StorageWriter):
    """Writes the checkpoint of a step into `folder`, and deletes all but the `keep` newest when it is complete.

    describe: makes the index from the files and what lies in them. whereabouts: is told when this rank writes.
    """

    def __init__(self, folder: Path, step: int, keep: int, describe: Describe, whereabouts: Nowhere = NOWHERE):
        self.folder, self.step, self.keep, self.describe, self.whereabouts = folder, step, keep, describe, whereabouts

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # checkpoints are named by their steps

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        if is_coordinator:
            begin(self.folder, self.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Numbers the files."""
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file, one tensor after the other."""
        future: Future[list[WriteResult]] = Future()
        if not plan.items:
            future.set_result([])
            return future
        items = sorted(plan.items, key=lambda item: -WIDTHS[_entry(item).dtype])
        path = unfinished(self.folder, self.step) / f"rank-{plan.storage_data:05d}.safetensors"
        entries = [_entry(item) for item in items]
        with self.whereabouts.writing():
            file, lies = write_tensors(path, entries, (_on_cpu(planner, item) for item in items))
        future.set_result(
            [
                WriteResult(item.index, prod(entry.shape) * WIDTHS[entry.dtype], (file, place))
                for item, entry, place in zip(items, entries, lies, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The index, the name, and room for it: on the coordinator, when every rank has written."""
        hidden = unfinished(self.folder, self.step)
        lies: dict[Key, tuple[int, Lies]] = {}
        files: list[File] = []
        for result in results:
            for written in result:
                file, place = written.storage_data
                if not files or files[-1] != file:
                    files.append(file)
                lies[key_of(written.index)] = len(files) - 1, place
        for file in files:
            opened(hidden, file).close()  # where ranks share no file system, theirs are missing here
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = [
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), number, place.at, place.check)
                for chunk in entry.chunks
                for number, place in (lies[name, tuple(chunk.offsets)],)
            ]
            assert sum(prod(chunk.sizes) for chunk in chunks) == prod(entry.size), f"{name} is not covered"
            tensors[name] = Stored(NAMES[entry.properties.dtype], tuple(entry.size), tuple(chunks))
        with self.whereabouts.writing():
            commit(self.folder, self.step, write_index(self.describe(tuple(files), tensors)))
            prune(self.folder, self.keep)


class Reader(StorageReader):
    """Reads the checkpoint `path`, whose index was read and checked before. Raises Damaged for bytes that are not those."""

    def __init__(self, path: Path, index: Index):
        self.path, self.index = path, index
        self.chunks = {
            (name, chunk.offsets): chunk for name, stored in index.tensors.items() for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata({name: _metadata(stored) for name, stored in self.index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads each chunk that something is wanted of once, file by file in the order of its bytes."""
        by_file: dict[int, dict[Key, list[ReadItem]]] = {}
        for item in plan.items:
            key = key_of(item.storage_index)
            by_file.setdefault(self.chunks[key].file, {}).setdefault(key, []).append(item)
        for number, wanted in by_file.items():
            with opened(self.path, self.index.files[number]) as file:
                for key in sorted(wanted, key=lambda key: self.chunks[key].at):
                    chunk, name = self.chunks[key], self.index.files[number].name
                    dtype = self.index.tensors[key[0]].dtype
                    tensor = read_tensor(file, name, Lies(chunk.at, chunk.check), dtype, chunk.sizes)
                    for item in wanted[key]:
                        _copy(tensor, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _copy(tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copies what the item wants of a chunk to where it wants it."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    there = planner.resolve_tensor(item)
    there.detach().copy_(tensor)
    planner.commit_tensor(item, there)


def _entry(item: WriteItem) -> Entry:
    """The tensor of an item under a name that says where in the whole it belongs: "weight/head.weight [0:64, 32:48]"."""
    data = item.tensor_data
    assert data is not None
    place = ", ".join(
        f"{start}:{start + size}" for start, size in zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    )
    return Entry(f"{item.index.fqn} [{place}]", NAMES[data.properties.dtype], tuple(data.chunk.sizes))


def _on_cpu(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach().cpu()


def _metadata(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(Size(chunk.offsets), Size(chunk.sizes)) for chunk in stored.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[stored.dtype]), Size(stored.shape), chunks)
