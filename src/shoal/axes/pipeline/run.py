"""The engine of pipeline parallelism: it executes any schedule, in the schedule's own order, and nothing else.

What is sent when comes from communication.py, which weights a micro-batch sees from live.py. Here: a forward keeps its input
and the end of autograd's graph, a backward walks the graph back and gives both up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.communication import Exchange, Message, Program, programs
from shoal.axes.pipeline.evaluation import forward_only
from shoal.axes.pipeline.live import uses
from shoal.axes.pipeline.mail import Mail
from shoal.axes.pipeline.schedules.instruction import Instruction, Place, Schedule, parts
from shoal.axes.pipeline.stash import Versions
from shoal.comm.world import Group
from shoal.kernels.linear import PutOff

Chunk = Callable[[Tensor | None, Any], Tensor]
Around = Callable[[Instruction, bool], AbstractContextManager[None]]


class Done(NamedTuple):
    """An instruction that was executed, from `start` to `stop` in seconds of time.perf_counter."""

    instruction: Instruction
    start: float
    stop: float


@dataclass
class Ran:
    """What a step left behind on this rank.

    losses: of the micro-batches that end here, by number. log: every instruction in the order of execution. peak: the
    most forwards whose activations were held at one time, over all chunks. versions: of each chunk's weights, the most.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    log: list[Done] = field(default_factory=list)
    peak: int = 0
    versions: Counter[int] = field(default_factory=Counter)


class Engine:
    """This rank's part of a pipeline.

    group: the pipeline's ranks, as the schedule numbers them. chunks: this rank's, as the schedule numbers them; called
    with what the stage before gave (None in the first) and the micro-batch, they answer with what the next one gets, the
    last with the loss, a scalar. Where the schedule splits a chunk's backward or updates in between, the chunk is a
    module; the layers in it that have `put_off` put weight gradients off. shape, dtype: of what goes from stage to stage.

    Raises ValueError, naming the instruction, for a schedule that is not sound.

    around: entered around every instruction; its second argument says whether this is the step's last one to make
    weight gradients of this chunk. update(chunk, micro_batch): what U does.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        chunks: Sequence[Chunk],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        around: Around = lambda instruction, last: nullcontext(),
        update: Callable[[int, int], None] | None = None,
    ):
        check(schedule, "tagged")  # messages come by the one order that programs() proves
        rank = group.index
        assert schedule.ranks == group.size, (
            f"{schedule.name} is for {schedule.ranks} ranks, the group has {group.size}"
        )
        assert len(chunks) == schedule.chunks(rank), (
            f"rank {rank} holds {schedule.chunks(rank)} chunks, not {len(chunks)}"
        )
        self.schedule, self.group, self.chunks, self.shape, self.dtype = schedule, group, chunks, tuple(shape), dtype
        self.around, self.update = around, update
        self.program = programs(schedule)[rank]
        order = list(schedule.instructions(rank))
        self.last = {x.chunk: x for x in order if x.kind in "BW"}  # a later one takes the place of an earlier one
        self.queues = {x.chunk: PutOff() for x in order if x.kind == "W"}
        for number, queue in self.queues.items():
            for module in _module(chunks[number]).modules():
                if hasattr(module, "put_off"):
                    setattr(module, "put_off", queue)  # noqa: B010  (torch types unknown attributes as tensors)
        self.sees: dict[int, dict[int, int]] = {}  # by chunk and micro-batch: the version of the weights
        if schedule.versions != "flush":
            for use in uses(schedule):
                place = schedule.routes[schedule.route_of[use.micro_batch]][use.stage]
                if place.rank == rank:
                    self.sees.setdefault(place.chunk, {})[use.micro_batch] = use.forward

    def step(self, batches: Sequence[Any], seed: float | Sequence[float], timed: bool = False) -> Ran:
        """Executes the schedule once; gradients add up on the parameters as autograd's do.

        batches: what the chunks get of each micro-batch. seed: d total / d loss, where backward starts, of all
        micro-batches or of each. timed: wait for a GPU before reading the clock, so that the log's times hold there too.
        """
        count = self.schedule.micro_batches
        assert len(batches) == count, f"{self.schedule.name} takes {count} micro-batches, not {len(batches)}"
        seeds = seed if isinstance(seed, Sequence) else [seed] * count
        run = _Run(self, self.schedule, batches, seeds, train=True, timed=timed)
        run.execute(self.program)
        return run.ran

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> Ran:
        """Forwards only, of any number of micro-batches. All transfers are recorded where the ledger is."""
        schedule = forward_only(self.schedule, len(batches))
        run = _Run(self, schedule, batches, [], train=False, timed=False)
        run.execute(programs(schedule)[self.group.index])
        return run.ran


def _module(chunk: Chunk) -> nn.Module:
    assert isinstance(chunk, nn.Module), "only a module's weights can be told from its inputs"
    return chunk


class _Kept(NamedTuple):
    """What a forward keeps for its backward.

    end: of autograd's graph, in place of the output, whose memory only the next stage needs. gradient: where backward
    starts on the last stage.
    """

    x: Tensor | None
    end: GradientEdge | None
    gradient: Tensor | None


class _Run:
    """One execution of a program."""

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        batches: Sequence[Any],
        seeds: Sequence[float],
        train: bool,
        timed: bool,
    ):
        self.engine, self.schedule, self.batches, self.seeds = engine, schedule, batches, seeds
        self.train, self.timed, self.rank = train, timed, engine.group.index
        self.mail = Mail(engine.group, engine.shape, engine.dtype, counted=train)
        self.kept: dict[tuple[int, int], _Kept] = {}  # by chunk and micro-batch
        self.put_off: dict[tuple[int, int], PutOff] = {}
        self.versions = {
            chunk: Versions(list(_module(engine.chunks[chunk]).parameters()), sees)
            for chunk, sees in (engine.sees if train else {}).items()
        }
        self.ran = Ran()

    def execute(self, program: Program) -> None:
        for action in program:
            if isinstance(action, Exchange):
                self.mail.post(action)
            else:
                for instruction in parts(action):
                    self._execute(instruction)
        self.mail.finish()
        assert not (self.kept or self.put_off), "a forward had no backward"

    def _execute(self, x: Instruction) -> None:
        match x.kind:
            case "F":
                received = self._input(x)
                with self._within(x, "forward"):
                    self._forward(x, received)
            case "B" | "I":
                gradient = self._output_gradient(x)
                with self._within(x, "backward"):
                    self._backward(x, gradient)
            case "W":
                with self._within(x, "backward"):
                    self.put_off.pop((x.chunk, x.micro_batch)).run()
            case "U":
                assert self.engine.update is not None, f"{self.schedule.name} updates weights: pass update"
                self.versions[x.chunk].keep()
                with self._within(x, "optimizer"):
                    self.engine.update(x.chunk, x.micro_batch)

    @contextmanager
    def _within(self, x: Instruction, phase: str) -> Iterator[None]:
        """Around an instruction's work, once everything it needs is there."""
        start = self._clock()
        with ExitStack() as stack:
            if self.train:
                stack.enter_context(self.engine.group.ledger.at(phase=phase, micro_batch=x.micro_batch))
                stack.enter_context(self.engine.around(x, self.engine.last.get(x.chunk) == x))
            versions = self.versions.get(x.chunk)
            if versions is not None and x.kind != "U":
                stack.enter_context(versions.of(x.micro_batch))
            yield
        self.ran.log.append(Done(x, start, self._clock()))
        if versions is not None:
            self.ran.versions[x.chunk] = max(self.ran.versions[x.chunk], len(versions))
            if x.kind in "BW":
                versions.done(x.micro_batch)

    # ---- forward

    def _input(self, x: Instruction) -> Tensor | None:
        before = self.schedule.previous(self.rank, x.chunk, x.micro_batch)
        if before is None:
            return None
        received = self.mail.take(Message("forward", x.micro_batch, before, Place(self.rank, x.chunk)))
        return received.requires_grad_(self.train)

    def _forward(self, x: Instruction, received: Tensor | None) -> None:
        y = self.engine.chunks[x.chunk](received, self.batches[x.micro_batch])
        after = self.schedule.next(self.rank, x.chunk, x.micro_batch)
        if after is None:
            self.ran.losses[x.micro_batch] = y.detach()
        else:
            self.mail.put(Message("forward", x.micro_batch, Place(self.rank, x.chunk), after), y.detach())
        if self.train:
            end = get_gradient_edge(y) if y.requires_grad else None
            gradient = torch.full_like(y, self.seeds[x.micro_batch]) if after is None else None
            self.kept[x.chunk, x.micro_batch] = _Kept(received, end, gradient)
            self.ran.peak = max(self.ran.peak, len(self.kept))

    # ---- backward

    def _output_gradient(self, x: Instruction) -> Tensor | None:
        after = self.schedule.next(self.rank, x.chunk, x.micro_batch)
        if after is None:
            return None
        return self.mail.take(Message("backward", x.micro_batch, after, Place(self.rank, x.chunk)))

    def _backward(self, x: Instruction, gradient: Tensor | None) -> None:
        received, end, start = self.kept.pop((x.chunk, x.micro_batch))
        gradient = start if gradient is None else gradient
        if end is not None:
            torch.autograd.backward([end], [gradient])
        before = self.schedule.previous(self.rank, x.chunk, x.micro_batch)
        if before is not None:
            assert received is not None and received.grad is not None, f"{x}: the output does not depend on the input"
            self.mail.put(Message("backward", x.micro_batch, Place(self.rank, x.chunk), before), received.grad)
        queue = self.engine.queues.get(x.chunk)
        if x.kind == "I":
            assert queue is not None, f"{x} has no W"
            self.put_off[x.chunk, x.micro_batch] = queue.take()
        elif queue is not None:
            queue.run()

    def _clock(self) -> float:
        if self.timed and self.engine.group.device.type == "cuda":
            torch.cuda.synchronize(self.engine.group.device)
        return perf_counter()
