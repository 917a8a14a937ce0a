"""A step's forwards and backwards in the order of the layout's schedule, over the ranks of a pipeline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.axes.pipeline.run import Engine
from shoal.axes.pipeline.schedules.instruction import Instruction
from shoal.axes.zero.cost import Parts
from shoal.comm.world import World
from shoal.model.batch import Batch
from shoal.model.decoder import Decoder
from shoal.plan.stages import schedule_of
from shoal.plan.traffic import TWICE
from shoal.spec.job import Job
from shoal.train.states import States


class Pipeline:
    """This rank's stages of `model` under the job's schedule, with their gradients in `states`.

    parts: what the states move at once, by name; a chunk's begin with its number.
    """

    def __init__(self, job: Job, world: World, model: Decoder, states: States, parts: Parts):
        self.states = states
        self.chunks = [model.chunk(number) for number in range(len(model.stages))]
        self.parts = [
            [name for name in parts if name.startswith(f"chunk {number} ")] for number in range(len(self.chunks))
        ]
        shape = model.layers.residual(job.micro_batch, job.own_sequence)
        dtype = next(model.parameters()).dtype
        self.engine = Engine(schedule_of(job), world.group("pp"), self.chunks, shape, dtype, around=self._around)

    def step(self, batches: Sequence[Batch], seed: float) -> float:
        """Forwards and backwards of all micro-batches, from `seed` = d total / d loss; the sum of losses known here."""
        with self.engine.group.ledger.at(phase="backward"), self.states.interleaved():
            ran = self.engine.step(batches, seed)
        return float(sum(map(float, ran.losses.values())))

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Forwards alone; the sum of losses known here."""
        return float(sum(map(float, self.engine.evaluate(batches).losses.values())))

    @contextmanager
    def _around(self, instruction: Instruction, last: bool) -> Iterator[None]:
        yield
        if instruction.kind in "BI":
            self.states.free([*self.parts[instruction.chunk], TWICE])
        if instruction.kind in "BW":
            self.states.finish(self.parts[instruction.chunk], last)
