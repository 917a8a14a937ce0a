"""torch.distributed.checkpoint's planners over a rank's parts: it plans, checks that all is covered, and reshards."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shoal.train.checkpoint.index import Damaged
from shoal.train.checkpoint.state import Part, key_of


class SavePlanner(DefaultSavePlanner):
    """Plans to write `parts`, of which no other rank writes any."""

    def __init__(self, parts: Sequence[Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = {part.key: part for part in parts}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(part) for part in self.parts.values()])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.parts[key_of(index)].tensor


class LoadPlanner(DefaultLoadPlanner):
    """Plans to fill `parts` from the chunks of a checkpoint, whatever layout cut them."""

    def __init__(self, parts: Sequence[Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = {part.key: part for part in parts}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Raises Damaged when the checkpoint does not hold all of a part."""
        assert self.metadata is not None
        wanted: dict[str, list[Part]] = {}
        for part in self.parts.values():
            wanted.setdefault(part.name, []).append(part)
        items = []
        for name, parts in wanted.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise Damaged(f"it holds no {name}")
            if stored.size != torch.Size(parts[0].shape):
                raise Damaged(f"its {name} is {tuple(stored.size)}, not {parts[0].shape}")
            found = create_read_items_for_chunk_list(name, stored, [_chunk(part) for part in parts])
            if sum(prod(item.lengths) for item in found) != sum(part.tensor.numel() for part in parts):
                raise Damaged(f"it does not hold all of {name}")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[key_of(index)].tensor


def _write_item(part: Part) -> WriteItem:
    properties = TensorProperties(dtype=part.tensor.dtype)
    data = TensorWriteData(_chunk(part), properties, torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.name, part.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape)
