"""Which layouts can be run: what would do nothing, and what does not go together, is refused here. No torch."""

from shoal.plan.stages import scheduled
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec


def refuse_idle(layout: Layout) -> None:
    """Raises RequestError for a layout of which a part would do nothing."""
    for key, idle, why in (
        ("hsdp", layout.hsdp > 1 and not layout.zero, "has no shards to replicate with zero = 0; zero=3 would do"),
        ("sp", layout.sp and layout.tp_size == 1, "has no tensor ranks to work on; tp=2,sp would do"),
        ("sp", layout.sp and layout.tp_grid, f"does nothing with tp={layout.tp}, where a grid cuts all activations"),
        ("regather", layout.regather and not layout.sp, "has no cut sequence to gather again; sp,regather would do"),
        ("reshard", layout.reshard != "always" and layout.zero < 3, "has no weights to free; zero=3 would do"),
        ("zero1", layout.zero1 != "rs+ag" and layout.zero != 1, "is about zero=1, which would do"),
        ("schedule", layout.schedule != "1f1b" and layout.pp == 1, "has no stages to order; pp=2 would do"),
        ("stages", layout.stages and layout.pp == 1, "has no pipeline to cut layers for; pp=2 would do"),
        ("v", layout.v > 1 and layout.pp == 1, "has no stages to cut into chunks; pp=2 would do"),
        ("dedup", layout.dedup and layout.ep == 1, "has no expert ranks to send tokens to; ep=2,dedup would do"),
    ):
        if idle:
            plain, value = getattr(Layout(), key), getattr(layout, key)
            off, value = (str(x).lower() if isinstance(x, bool) else x for x in (plain, value))
            raise RequestError(f"layout.{key}", f"layout.{key} = {value} {why}, or {key}={off or 'nothing'}")


def updates_between(layout: Layout) -> bool:
    """Whether the pipeline updates weights between the micro-batches of a step. Raises RequestError for no schedule."""
    return layout.pp > 1 and scheduled(layout).versions != "flush"


def refuse_updates(layout: Layout, model: ModelSpec) -> None:
    """Raises RequestError for what cannot go with a schedule that updates weights between the micro-batches of a step."""
    if not updates_between(layout):
        return
    name = f"layout.schedule = {layout.schedule}"
    if layout.schedule.endswith(".csv"):
        raise RequestError(
            "layout.schedule",
            f"{name} updates weights between micro-batches, which this version runs in its own orders alone; "
            "pipedream, pipedream-vertical or pipedream-2bw would do",
        )
    if layout.zero == 3:
        raise RequestError(
            "layout.zero",
            f"layout.zero = 3 keeps no whole weights, of which {name} needs several versions; zero=2 would do",
        )
    if model.tied:
        raise RequestError(
            "model.tied",
            f"model.tied = true has one matrix in the first and the last stage, which {name} updates at different "
            "times; false would do, or schedule=1f1b",
        )


def refuse_clipping(job: Job) -> None:
    """Raises RequestError for clipping by a norm which is not known when the weights are updated."""
    if job.train.clip and updates_between(job.layout):
        raise RequestError(
            "train.clip",
            f"train.clip = {job.train.clip} needs the gradients of all stages, and with layout.schedule = "
            f"{job.layout.schedule} each stage updates before the next one has its own; 0 would do",
        )
