"""A step's forwards and backwards in the order of the layout's schedule, over the ranks of a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from shoal.axes.pipeline.run import Engine, Ran
from shoal.axes.pipeline.schedules.instruction import Instruction
from shoal.axes.zero.cost import Parts
from shoal.comm.world import World
from shoal.model.batch import Batch
from shoal.model.decoder import Decoder
from shoal.plan.stages import mini_batches, schedule_of
from shoal.plan.traffic import TWICE
from shoal.spec.job import Job
from shoal.train.states import States


class Pipeline:
    """This rank's stages of `model` under the job's schedule, with their gradients in `states`.

    parts: what the states move at once, by name; a chunk's begin with its number. updating: whether the schedule updates
    weights between micro-batches; then this rank holds one chunk. ran: what the last step left behind.
    """

    def __init__(self, job: Job, world: World, model: Decoder, states: States, parts: Parts):
        self.states = states
        self.chunks = [model.chunk(number) for number in range(len(model.stages))]
        self.parts = [
            [name for name in parts if name.startswith(f"chunk {number} ")] for number in range(len(self.chunks))
        ]
        shape = model.layers.residual(job.micro_batch, job.own_sequence)
        dtype = next(model.parameters()).dtype
        schedule = schedule_of(job)
        self.updating, self.mini_batches = schedule.versions != "flush", mini_batches(job)
        one_owner = len(self.chunks) == 1 and not job.model.tied and job.layout.zero < 3 and not job.train.clip
        assert one_owner or not self.updating, "plan/refusals.py refuses this: a stage cannot update by itself"
        self.engine = Engine(
            schedule,
            world.group("pp"),
            self.chunks,
            shape,
            dtype,
            around=self._around_backward if self.updating else self._around,
            update=self._updated,
        )
        self._update: Callable[[], None] | None = None
        self.ran: Ran | None = None

    def step(self, batches: Sequence[Batch], seeds: Sequence[float], update: Callable[[], None] | None = None) -> float:
        """Forwards and backwards of all micro-batches; the sum of losses known here.

        seeds: d total / d loss by micro-batch. update: called wherever the schedule updates this rank's weights, when the
        gradients of the mini-batch are complete over the data axis.
        """
        self._update = update
        ledger = self.engine.group.ledger
        with ledger.at(phase="backward"), nullcontext() if self.updating else self.states.interleaved():
            ran = self.ran = self.engine.step(batches, seeds)
        return float(sum(map(float, ran.losses.values())))

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Forwards alone; the sum of losses known here."""
        return float(sum(map(float, self.engine.evaluate(batches).losses.values())))

    def _updated(self, chunk: int, micro_batch: int) -> None:
        assert self._update is not None, "the schedule updates weights between micro-batches: pass update"
        self._update()

    @contextmanager
    def _around(self, instruction: Instruction, last: bool) -> Iterator[None]:
        yield
        if instruction.kind in "BI":
            self.states.free([*self.parts[instruction.chunk], TWICE])
        if instruction.kind in "BW":
            self.states.finish(self.parts[instruction.chunk], last)

    @contextmanager
    def _around_backward(self, instruction: Instruction, last: bool) -> Iterator[None]:
        """Where weights are updated in between, no two backwards overlap, so each is a micro-batch as without a pipeline."""
        with ExitStack() as stack:
            if instruction.kind == "B":
                run = next(run for run in self.mini_batches if instruction.micro_batch in run)
                first, final = instruction.micro_batch == run[0], instruction.micro_batch == run[-1]
                stack.enter_context(self.states.micro_batch(first, final))
            yield
