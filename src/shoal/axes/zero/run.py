"""ZeRO-1, 2, 3 and hybrid shard running: one mechanism, and for every stage another lifetime of its buffers.

Hooks on parameters take each gradient as backward finishes it; a part whose gradients are complete leaves for its shard.
In stage 3, hooks on units gather a unit before it computes, in forward and in backward, fetch the next one meanwhile and
free what is done. Parts leave in one order on every rank, since collectives in different order give silently wrong sums.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.axes.flat import Held, on_gradient
from shoal.axes.memory import Memory
from shoal.axes.zero.part import Part
from shoal.comm.collectives import Handle, all_gather, all_reduce
from shoal.comm.world import Group


class ZeRO:
    """The sharded states of a model over `group`.

    runs: named parameters of each part, in stage 3 of each unit; units in forward order, buckets in backward order.
    decays: names of parameters with weight decay. modules: for stage 3, the modules that use each unit when called.
    kept: units that stay gathered from forward to backward, in a pipeline to the step's last. replicas: the ranks that
    hold the same shards, for hybrid shard. literal: stage 1 sums whole gradients with an all-reduce. gradient_dtype: of
    gradients on the wire and in the shards, by default that of the parameters.
    """

    def __init__(
        self,
        runs: Mapping[str, Sequence[tuple[str, nn.Parameter]]],
        decays: set[str],
        group: Group,
        *,
        stage: int,
        modules: Mapping[str, Sequence[nn.Module]] | None = None,
        kept: set[str] | None = None,
        replicas: Group | None = None,
        literal: bool = False,
        gradient_dtype: torch.dtype | None = None,
    ):
        self.group, self.stage, self.replicas, self.literal = group, stage, replicas, literal
        self.shards = group
        self.memory = Memory()
        self.units: list[Unit] = []
        self.order: list[Unit] = []  # as they were first called, learnt for prefetching
        self.calls, self.first_call = 0, dict[Unit, int]()  # of this micro-batch
        self.parts: list[Part] = []  # the trainable ones, as their gradients leave: in backward order
        for name, run in runs.items():
            made = [Part(name, part, decays, group, stage, self.memory, gradient_dtype) for part in _alike(run, stage)]
            self.parts += [part for part in made if part.trainable]
            if stage == 3:
                self.units.append(Unit(self, name, made, (modules or {})[name], keep=name in (kept or set())))
        if stage == 3:
            self.parts.reverse()
        self.first = self.last = True  # of the step's micro-batches
        self.pipelined = False  # whether micro-batches overlap
        self.complete: set[int] = set()
        self.sent = 0  # parts that have left in this backward
        self.in_flight: tuple[Part, Handle] | None = None
        for place, part in enumerate(self.parts):
            for index, slot in enumerate(part.slots):
                on_gradient(slot.parameter, self._arrived, place, index)

    @property
    def shared(self) -> bool:
        """Whether the whole weights need all ranks."""
        return self.stage == 3 and self.group.size > 1

    # ---- one micro-batch

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; on leaving the last, every shard holds the global gradient."""
        self._begin(first, last)
        yield
        if self._leaves:
            self._send(len(self.parts))
            self._settle()
        for unit in self.units:
            unit.free()
        for unit, following in pairwise(self.order):
            unit.next, following.previous = following, unit
        if last:
            self._sum_over_replicas()

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Around a whole step of a pipeline, whose micro-batches overlap; on leaving, shards hold the global gradients.

        `finish` says when a backward was made, and units are fetched in the order in which they were given.
        """
        self._begin(first=True, last=False)
        self.pipelined = True
        yield
        for part in self.parts:
            if not part.left:
                self._leave(part)
        self._settle()
        for unit in self.units:
            unit.free()
        self._sum_over_replicas()

    def finish(self, names: Collection[str], last: bool) -> None:
        """The parts of these runs got all gradients of one more micro-batch; last: of the step's last one."""
        self.free(names, last)
        if self.stage == 1 and not last:
            return
        for part in self.parts:
            if part.name in names:
                self._leave(part)
        if self.stage > 1:
            self._settle()  # the next backward fills the same buffers

    def free(self, names: Collection[str], last: bool = False) -> None:
        """Gives the gathered weights of these runs back, in stage 3; those that are kept only after the last micro-batch,
        since in a pipeline the next one is under way already.
        """
        for unit in self.units:
            if unit.name in names and (last or not unit.keep):
                unit.free()

    def _begin(self, first: bool, last: bool) -> None:
        self.first, self.last, self.sent, self.pipelined = first, last, 0, False
        self.complete = set()
        for part in self.parts:
            part.arrived = set()
            if first:
                part.begin_step()
        self.calls, self.first_call = 0, {}

    def _sum_over_replicas(self) -> None:
        if self.replicas is not None and self.replicas.size > 1:
            for handle in [all_reduce(part.gradients, self.replicas, asynchronous=True) for part in self.parts]:
                handle.wait()

    @property
    def _leaves(self) -> bool:
        """Whether gradients leave in this micro-batch: in stage 1 they stay whole until the last."""
        return self.stage > 1 or self.last

    def _arrived(self, place: int, index: int, parameter: nn.Parameter) -> None:
        part = self.parts[place]
        if parameter.grad is None:
            return  # put off: this hook fires again when the gradient is made
        if self.stage > 1 and not self.pipelined and place > self.sent:
            self._settle()  # its turn is later: the part that comes before it fills beside it, and two at most are whole
        if not part.absorb(index) or self.pipelined:
            return
        self.complete.add(place)
        if self._leaves:
            ready = self.sent
            while ready in self.complete:
                ready += 1
            self._send(ready)

    def _send(self, stop: int) -> None:
        """Sends the parts before `stop` that have not left, in order; one is on its way while the next one fills."""
        while self.sent < stop:
            self._leave(self.parts[self.sent])
            self.sent += 1

    def _leave(self, part: Part) -> None:
        part.fill()
        part.left = True
        self._settle()
        self.in_flight = part, part.reduce(self.literal)
        if not self.pipelined:  # else `free` knows whether another micro-batch still needs it
            part.free()

    def _settle(self) -> None:
        if self.in_flight is not None:
            part, handle = self.in_flight
            self.in_flight = None
            part.take_in(handle)

    def saw(self, unit: "Unit") -> int:
        """A unit's forward begins; the number of this call in the micro-batch."""
        if self.pipelined:
            return 0
        if unit not in self.order:
            self.order.append(unit)
        self.first_call.setdefault(unit, self.calls)
        self.calls += 1
        return self.calls - 1

    def passed(self, call: int) -> None:
        """Backward has come back to a call: every unit that was first called later is done, so its parts leave.

        That holds also where a parameter took no part on this rank and its gradient never comes.
        """
        if self.pipelined:
            return
        stop = 0
        for unit in reversed(self.units):
            if self.first_call.get(unit, call + 1) <= call:
                break
            stop += sum(part.trainable for part in unit.parts)
        self._send(stop)

    # ---- the rest of a step

    def held(self) -> Iterator[Held]:
        """This rank's pieces of the gradients."""
        for part in self.parts:
            yield Held(part.gradients, part.flat.spans(part.mine.start, part.mine.stop))

    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`, in place."""
        for part in self.parts:
            part.gradients.mul_(factor)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(weights, gradients, decays) of this rank's pieces: what its optimizer updates."""
        for part in self.parts:
            yield from part.runs()

    def spread(self) -> None:
        """After an update: stages 1 and 2 hand every rank the pieces that the others updated."""
        if self.stage < 3:
            for handle in [part.spread() for part in self.parts]:
                handle.wait()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole gradient) of every trainable parameter; a collective, which the ledger does not count."""
        for part in self.parts:
            whole = self._uncounted(part.gradients)
            for slot in part.slots:
                yield slot.name, slot.view(whole)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole weight) of every trainable parameter; a collective, which the ledger does not count."""
        for part in self.parts:
            whole = self._uncounted(part.weights) if self.stage == 3 else part.whole
            for slot in part.slots:
                yield slot.name, slot.view(whole)

    def _uncounted(self, piece: Tensor) -> Tensor:
        with self.group.ledger.off():
            return all_gather(piece, self.group)


class Unit:
    """What stage 3 gathers at once: the parts of some modules.

    keep: the unit stays gathered from forward until its gradients have left. Which unit comes next is learnt from the
    first forward, so that it can be fetched while this one computes.
    """

    def __init__(self, zero: ZeRO, name: str, parts: Sequence[Part], modules: Sequence[nn.Module], keep: bool):
        self.zero, self.name, self.parts, self.keep, self.call = zero, name, parts, keep, 0
        self.next: Unit | None = None
        self.previous: Unit | None = None
        for module in modules:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    def gather(self) -> None:
        for part in self.parts:
            part.gather()

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def free(self) -> None:
        for part in self.parts:
            part.free()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        self.wait()
        again = self in self.zero.first_call
        self.call = self.zero.saw(self)
        if self.next is not None and not again:
            self.next.gather()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not tensors or not self.keep:
            self.free()
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, self.call))

    def _before_backward(self, call: int, gradient: Tensor) -> None:
        self.zero.passed(call)
        self.wait()
        if self.previous is not None:
            self.previous.gather()


def _alike(run: Sequence[tuple[str, nn.Parameter]], stage: int) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters that can share flat buffers: of one dtype, trainable or frozen; frozen ones move in stage 3 only."""
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in run:
        if parameter.requires_grad or stage == 3:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append((name, parameter))
    return list(kinds.values())


def _tensors(output: Any) -> list[Tensor]:
    """Every tensor in a module's output."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = output.values()
    if isinstance(output, Iterable) and not isinstance(output, str):
        return [tensor for item in output for tensor in _tensors(item)]
    return []
