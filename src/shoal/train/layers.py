"""Which layers a rank's decoder is built from: chosen by the layout."""

from shoal.axes.context.run import ContextAttention
from shoal.axes.tensor.run import TensorLayers
from shoal.axes.tensor2d.run import Tensor2DLayers
from shoal.comm.world import World
from shoal.model.layers import Layers
from shoal.spec.job import Job


def layers_of(job: Job, world: World) -> Layers:
    """The layers of this rank of `world` under the job's layout."""
    layout = job.layout
    if layout.tp_grid:
        return Tensor2DLayers(job.model, world.group("row"), world.group("column"), world.group("tp"))
    return TensorLayers(job.model, world.group("tp"), layout.sp, layout.regather)


def crossing_of(job: Job, world: World) -> ContextAttention | None:
    """How this rank's attention crosses the context ranks; None where it has the whole sequence."""
    layout = job.layout
    if layout.cp == 1:
        return None
    hybrid = layout.cp_kind == "hybrid"
    ring, ulysses = (world.group(axis) if hybrid else None for axis in ("ring", "ulysses"))
    return ContextAttention(layout.cp_kind, world.group("cp"), ring, ulysses)
