"""What does not go together, as one table: it refuses jobs, and the list in the README is printed from it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from shoal.mesh import Mesh
from shoal.plan.stages import check_pipeline, scheduled
from shoal.spec.errors import RequestError, divisors
from shoal.spec.job import Job
from shoal.spec.layout import AXES, Layout


@dataclass(frozen=True)
class Refusal:
    """One combination that is refused: `field`, `met` with something, `why`, and changes of which each one would do.

    instead: as options are written, "zero=3" for layout.zero, "model.tied=false" for others. nearest: of one job, where
    values that would do depend on the rest of it.
    """

    field: str
    met: str
    why: str
    instead: tuple[str, ...]
    holds: Callable[[Job], bool]
    nearest: Callable[[Job], tuple[str, ...]] | None = None

    def __str__(self) -> str:
        return f"{self.field} {self.met}: {self.why}; {' or '.join(self.instead)} would do"

    def line(self, job: Job) -> str:
        """The same about one job, with the value that it has and changes that would do for it."""
        value = reduce(getattr, self.field.split("."), job)
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{self.field} = {shown} {self.met}: {self.why}; {' or '.join(self.changes(job))} would do"

    def changes(self, job: Job) -> tuple[str, ...]:
        """What would do for one job."""
        return self.nearest(job) if self.nearest else self.instead


def refuse(job: Job) -> None:
    """Raises RequestError for a job of which parts do not go together or would do nothing."""
    for refusal in REFUSALS:
        if refusal.holds(job):
            raise RequestError(refusal.field, refusal.line(job))


def check_job(job: Job) -> None:
    """Raises RequestError for a job that cannot be run, as far as no file and no device is needed to tell."""
    refuse(job)
    check_pipeline(job.layout, job.model.tied, job.model.layers)
    job.check()


def updates_between(layout: Layout) -> bool:
    """Whether the pipeline updates weights between the micro-batches of a step. Raises RequestError for no schedule."""
    return layout.pp > 1 and scheduled(layout).versions != "flush"


def _updates(job: Job) -> bool:
    return updates_between(job.layout)


def _apart(layout: Layout) -> bool:
    """Whether experts lie across replicas of hybrid sharding, so that none can shard its own."""
    return layout.hsdp > 1 and layout.ep > 1 and not Mesh.of(layout).has("eshard")


def _in_order(layout: Layout) -> bool:
    """Whether experts lie inside replicas once the axes are in the usual order."""
    return not _apart(replace(layout, order=ORDER))


def _within_replicas(job: Job) -> tuple[str, ...]:
    """The most replicas for as many expert ranks, and the most expert ranks for as many replicas."""
    layout = job.layout
    hsdp = [replicas for replicas in divisors(layout.hsdp) if not _apart(replace(layout, hsdp=replicas))]
    ep = [ranks for ranks in divisors(layout.ep) if not _apart(replace(layout, ep=ranks))]
    return f"hsdp={hsdp[-1]}", f"ep={ep[-1]}"


ORDER = "-".join(AXES)
_UPDATES = "with a schedule that updates weights between micro-batches"

REFUSALS = (
    # parts of a layout that would do nothing
    Refusal(
        "layout.hsdp",
        "with zero = 0",
        "there are no shards to replicate",
        ("zero=3", "hsdp=1"),
        lambda job: job.layout.hsdp > 1 and not job.layout.zero,
    ),
    Refusal(
        "layout.reshard",
        "with zero below 3",
        "there are no weights to free",
        ("zero=3", "reshard=always"),
        lambda job: job.layout.reshard != "always" and job.layout.zero < 3,
    ),
    Refusal(
        "layout.zero1",
        "without zero = 1",
        "it says how that stage sums gradients",
        ("zero=1", "zero1=rs+ag"),
        lambda job: job.layout.zero1 != "rs+ag" and job.layout.zero != 1,
    ),
    Refusal(
        "layout.sp",
        "with tp = 1",
        "there are no tensor ranks to cut the sequence over",
        ("tp=2", "sp=false"),
        lambda job: job.layout.sp and job.layout.tp_size == 1,
    ),
    Refusal(
        "layout.sp",
        "with a grid of tensor ranks",
        "the grid cuts all activations as it is",
        ("sp=false",),
        lambda job: job.layout.sp and job.layout.tp_grid is not None,
    ),
    Refusal(
        "layout.regather",
        "without sp",
        "there is no cut sequence to gather again",
        ("tp=2,sp", "regather=false"),
        lambda job: job.layout.regather and not job.layout.sp,
    ),
    Refusal(
        "layout.schedule",
        "with pp = 1",
        "there are no stages to order",
        ("pp=2", "schedule=1f1b"),
        lambda job: job.layout.schedule != "1f1b" and job.layout.pp == 1,
    ),
    Refusal(
        "layout.stages",
        "with pp = 1",
        "there is no pipeline to cut layers for",
        ("pp=2", "no stages"),
        lambda job: bool(job.layout.stages) and job.layout.pp == 1,
    ),
    Refusal(
        "layout.v",
        "with pp = 1",
        "there are no stages to cut into chunks",
        ("pp=2,schedule=interleaved", "v=1"),
        lambda job: job.layout.v > 1 and job.layout.pp == 1,
    ),
    Refusal(
        "layout.dedup",
        "with ep = 1",
        "there are no expert ranks to send tokens to",
        ("ep=2", "dedup=false"),
        lambda job: job.layout.dedup and job.layout.ep == 1,
    ),
    # experts
    Refusal(
        "layout.ep",
        "without experts in the model",
        "there is nothing to spread",
        ("ep=1", "model.preset=moe-tiny"),
        lambda job: job.layout.ep > 1 and job.model.moe is None,
    ),
    Refusal(
        "layout.etp",
        "without experts in the model",
        "there is nothing to cut",
        ("etp=1", "model.preset=moe-tiny"),
        lambda job: job.layout.etp > 1 and job.model.moe is None,
    ),
    Refusal(
        "layout.tp",
        "with experts in the model",
        "a grid of tensor ranks cuts no experts",
        ("tp=4", "tp=1"),
        lambda job: job.layout.tp_grid is not None and job.model.moe is not None,
    ),
    Refusal(
        "layout.hsdp",
        "with experts that reach over several replicas",
        "each replica shards the experts that it holds, so it has to hold them all",
        ("hsdp=1", "ep=1"),
        lambda job: _apart(job.layout) and not _in_order(job.layout),
        _within_replicas,
    ),
    Refusal(
        "layout.order",
        "with hsdp and ep above 1, and axes of tokens or experts outside dp",
        "each replica shards the experts that it holds, so its ranks have to be neighbours",
        (f"order={ORDER}", "hsdp=1", "ep=1"),
        lambda job: _apart(job.layout) and _in_order(job.layout),
    ),
    Refusal(
        "data.pad",
        "with experts in the model and a sequence that the layout fills up",
        "what fills it up would count in the experts' balance",
        ("data.pad=false",),
        lambda job: job.model.moe is not None and job.sequence > job.data.sequence,
    ),
    # updates between micro-batches
    Refusal(
        "layout.schedule",
        "from a file, and one that updates weights between micro-batches",
        "this version runs such updates in its own orders alone",
        ("schedule=pipedream", "schedule=pipedream-vertical", "schedule=pipedream-2bw"),
        lambda job: job.layout.schedule.endswith(".csv") and _updates(job),
    ),
    Refusal(
        "layout.zero",
        _UPDATES,
        "it keeps several versions of whole weights, which stage 3 does not have",
        ("zero=2", "schedule=1f1b"),
        lambda job: job.layout.zero == 3 and _updates(job),
    ),
    Refusal(
        "model.tied",
        _UPDATES,
        "the first and the last stage would update one matrix at different times",
        ("model.tied=false", "schedule=1f1b"),
        lambda job: job.model.tied and _updates(job),
    ),
    Refusal(
        "train.clip",
        _UPDATES,
        "a stage updates before the other stages' gradients are there",
        ("train.clip=0", "schedule=1f1b"),
        lambda job: job.train.clip > 0 and _updates(job),
    ),
    Refusal(
        "train.reduce_dtype",
        "without bfloat16 weights under ZeRO",
        "gradients are summed in the weights' own type",
        ("train.reduce_dtype=same", "zero=1,train.dtype=bfloat16"),
        lambda job: job.train.reduce_dtype == "float32" and not (job.layout.zero and job.train.dtype == "bfloat16"),
    ),
)
