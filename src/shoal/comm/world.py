"""A rank's view of the run: its groups along the mesh's axes, with a process group where there are others in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from shoal.comm.ledger import Ledger
from shoal.comm.whereabouts import SILENT, Calls
from shoal.mesh import PAIRS, Mesh
from shoal.spec.layout import Layout


@dataclass(frozen=True)
class Group:
    """The ranks along some axes, as collectives want them. A group of one is silent: no messages, no ledger rows.

    ranks: numbers in the world, ascending; index: this rank's place among them (roots and peers are such places too).
    process_group: torch's, None in a group of one. calls: where this rank notes what it calls and waits for.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    device: torch.device
    process_group: dist.ProcessGroup | None = None
    calls: Calls = field(default=SILENT, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __deepcopy__(self, memo: dict) -> "Group":
        """Refused: copies lose the hooks of their parameters, and with them sums over the ranks."""
        raise TypeError(
            "a module whose weights are cut over ranks cannot be copied; a second one that is made and cut alike, with "
            "load_state_dict, would do"
        )

    def alone(self) -> "Group":
        """The group of this rank alone."""
        return Group(self.axis, (self.ranks[self.index],), 0, self.ledger, self.device)


class World:
    """This rank among all of a mesh's, once torch.distributed is initialised with mesh.world processes.

    device: where this rank's tensors live. timeout: seconds after which a waiting collective gives up; None is torch's
    half an hour, save in the group of all ranks, which keeps what it was initialised with. alone: whether no other rank
    runs (comm/rehearsal.py), so that only this rank's own groups are made.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        ledger: Ledger,
        device: torch.device | str = "cpu",
        timeout: float | None = None,
        alone: bool = False,
    ):
        assert mesh.world == 1 or dist.get_world_size() == mesh.world, "the mesh and torch.distributed differ in size"
        self.mesh, self.rank, self.ledger, self.device = mesh, rank, ledger, torch.device(device)
        self.alone = alone
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self._process_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    @classmethod
    def single(cls, ledger: Ledger | None = None, device: torch.device | str = "cpu") -> Self:
        """The world of one process, without torch.distributed: every group has one rank."""
        return cls(Mesh.of(Layout()), 0, ledger or Ledger(), device)

    @property
    def size(self) -> int:
        return self.mesh.world

    def group(self, axes: str | Sequence[str]) -> Group:
        """The group of this rank along `axes`, named by them ("dp", or "dp+cp" for several).

        Every rank calls this for the same axes in the same order: the first call for a partition of the world is a
        collective. Axes that cut the world in the same way share a process group.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        ranks = tuple(self.mesh.group(axes, self.rank))
        assert list(ranks) == sorted(ranks), "torch numbers the ranks of a group in ascending order"
        paired = self.mesh.size("pp") > 1 and not set(PAIRS).isdisjoint(axes)
        # A pair leaves some ranks alone, which take part in making the groups of the others.
        process_group = self._process_group(axes) if len(ranks) > 1 or paired else None
        axis = "+".join(axes)
        calls = self.ledger.whereabouts.calls(axis, ranks)
        return Group(axis, ranks, ranks.index(self.rank), self.ledger, self.device, process_group, calls)

    def calls(self) -> Calls:
        """Where this rank notes what it calls all ranks of the world for."""
        return self.ledger.whereabouts.calls("world", range(self.size))

    def close(self) -> None:
        """Destroys the process groups made here; torch.distributed itself stays for whoever initialised it."""
        for process_group in self._process_groups.values():
            if process_group is not dist.group.WORLD:
                dist.destroy_process_group(process_group)
        self._process_groups.clear()

    def _process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        partition = tuple(sorted(tuple(ranks) for ranks in self.mesh.groups(axes)))
        if partition not in self._process_groups:
            self._process_groups[partition] = self._make(partition)
        return self._process_groups[partition]

    def _make(self, partition: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
        if len(partition) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if self.alone:
            own = next(ranks for ranks in partition if self.rank in ranks)
            return dist.new_group(list(own), use_local_synchronization=True)
        # Everybody makes every group, in one order: torch counts them to name them.
        call = self.calls().begin("new_group")
        made = [dist.new_group(list(ranks), timeout=self.timeout) for ranks in partition]
        call.done()
        return next(group for ranks, group in zip(partition, made, strict=True) if self.rank in ranks)
