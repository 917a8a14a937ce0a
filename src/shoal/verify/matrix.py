"""Named sets of layouts, from one axis alone to four together, that are proven one after the other. No torch.

Each entry is a layout, and what its model, data and training have that the small model does not: entries are few because
they are chosen so that every axis meets every other at least once, and every option of each is there.
"""

from dataclasses import dataclass

from shoal.spec.build import job_from_tree
from shoal.spec.job import Job
from shoal.spec.layout import layout_tree

GPT2 = {"model": {"preset": "gpt2"}}  # tied, learned positions, LayerNorm, GELU, biases, dropout
TIED = {"model": {"preset": "tiny", "tied": True}}
MQA = {"model": {"preset": "tiny", "kv_heads": 1}}
WINDOW = {"model": {"preset": "mistral-7b"}}
EXPERTS = {"model": {"preset": "moe-tiny"}}
DEEPSEEK = {
    "model": {  # sigmoid scores, groups, a bias that moves, shared experts, a dense layer first
        "preset": "moe-tiny",
        "moe": {
            "experts": 16,
            "top_k": 4,
            "expert_ffn": 32,
            "router": "sigmoid",
            "groups": 4,
            "groups_kept": 2,
            "bias": True,
            "scaling": 2.5,
            "shared_experts": 1,
            "first_dense": 1,
        },
    }
}
DROPS = {"model": {"preset": "moe-tiny", "moe": {"capacity": 1.0, "aux_loss": 0.01, "z_loss": 0.001}}}
BY_MICRO_BATCH = {"model": {"preset": "moe-tiny", "moe": {"aux_loss": 0.01, "balance": "micro_batch"}}}
PACKED = {"data": {"packing": "packed"}}
PADDED = {"data": {"pad": True, "sequence": 13}}
ON_DISK = {"train": {"offload": "disk"}}


@dataclass(frozen=True)
class Entry:
    """A layout, and the parts of a job that belong to it. core: whether it is one of the few for every run."""

    layout: str
    job: dict[str, dict]
    core: bool = False

    @property
    def ranks(self) -> int:
        return self.asked().layout.world

    def asked(self) -> Job:
        """The job to verify."""
        return job_from_tree({"model": {"preset": "tiny"}, **self.job, "layout": layout_tree(self.layout)})


def _few(layout: str, job: dict[str, dict] | None = None) -> Entry:
    return Entry(layout, job or {}, core=True)


def _more(layout: str, job: dict[str, dict] | None = None) -> Entry:
    return Entry(layout, job or {})


SETS = {
    "data": (
        _few("dp=3,micro_batches=2"),
        _more("dp=4,zero=1"),
        _more("dp=4,zero=1,zero1=ar+ag", GPT2),
        _more("dp=3,zero=2,micro_batches=2", TIED),
        _few("dp=4,zero=3"),
        _more("dp=2,zero=3,reshard=never,micro_batches=2"),
        _more("dp=2,zero=3,reshard=keep_last,recompute=full"),
        _more("dp=2,zero=3", ON_DISK),
        _more("dp=8,zero=3,hsdp=2"),
        _more("dp=4,zero=2,hsdp=2", GPT2),
    ),
    "tensor": (
        _more("tp=2", GPT2),
        _more("tp=4", MQA),
        _more("tp=8,sp"),
        _few("tp=2,sp,regather", TIED),
        _more("tp=3,sp,recompute=selective"),
        _few("tp=2x2", TIED),
        _more("tp=3x3", GPT2),
        _more("tp=4x4"),
    ),
    "pipeline": (
        _more("pp=2,schedule=naive"),
        _more("pp=4,schedule=gpipe", TIED),
        _few("pp=4,schedule=1f1b,micro_batches=6"),
        _more("pp=4,schedule=interleaved,v=2,micro_batches=8", GPT2),
        _more("pp=2,schedule=breadth-first,v=3,micro_batches=4,recompute=1"),
        _more("pp=4,schedule=zb-h1"),
        _more("pp=4,schedule=zb-h2", TIED),
        _few("pp=2,schedule=zb-v"),
        _more("pp=4,schedule=dualpipe,micro_batches=8", TIED),
        _more("pp=4,schedule=dualpipe-v,micro_batches=8"),
        _more("pp=8,schedule=1f1b,micro_batches=8,stages=1-2-1-2-1-2-1-2"),
        _more("pp=3,schedule=pipedream"),
        _more("pp=2,schedule=pipedream-vertical"),
        _more("pp=3,schedule=pipedream-2bw,micro_batches=6"),
    ),
    "context": (
        _more("cp=4,cp_kind=ring", WINDOW),
        _few("cp=3,cp_kind=zigzag"),
        _more("cp=4,cp_kind=striped", PACKED),
        _more("cp=2,cp_kind=ulysses", MQA),
        _more("cp=4,cp_kind=allgather", GPT2),
        _more("cp=8,ulysses=2", PACKED),
        _more("cp=4", PADDED),
    ),
    "expert": (
        _few("dp=2,ep=2", EXPERTS),
        _more("dp=4,ep=4,zero=1", DEEPSEEK),
        _more("dp=8,ep=8,micro_batches=2,dedup", EXPERTS),
        _more("dp=4,ep=2,zero=3", DROPS),
        _more("tp=2,ep=2", EXPERTS),
        _more("dp=2,tp=2,ep=2,etp=2,sp", DEEPSEEK),
        _more("cp=2,ep=2", DROPS),
        _more("dp=2,pp=2,ep=2,schedule=interleaved", BY_MICRO_BATCH),
    ),
    "combined": (
        _more("dp=2,tp=2"),
        _more("dp=2,tp=4,sp,zero=1", TIED),
        _more("dp=3,tp=2,zero=3,sp", GPT2),
        _more("dp=2,tp=2x2,zero=2"),
        _more("dp=4,tp=2,zero=3,hsdp=2,sp,regather"),
        _more("dp=2,pp=2,zero=3,schedule=zb-h1", TIED),
        _more("dp=2,pp=4,zero=1,schedule=interleaved,micro_batches=8"),
        _more("dp=2,pp=2,zero=2,schedule=pipedream"),
        _more("dp=2,cp=2,zero=3", PACKED),
        _more("tp=2,cp=2,sp,cp_kind=ulysses"),
        _more("tp=2x2,cp=2,cp_kind=allgather"),
        _more("tp=2,pp=2,sp,schedule=dualpipe", TIED),
        _more("tp=2x2,pp=2,schedule=gpipe"),
        _more("cp=4,pp=2,schedule=zb-v,ulysses=2"),
        _few("dp=2,tp=2,pp=2,sp,zero=1"),
        _more("dp=2,tp=2,cp=2,sp,zero=3", GPT2),
        _more("dp=2,cp=2,pp=2,zero=2,recompute=full", WINDOW),
        _more("tp=2,cp=2,pp=2,sp,schedule=dualpipe-v,recompute=selective"),
        _more("dp=2,tp=2,pp=2,cp=2,zero=3,sp,micro_batches=4"),
        _more("dp=2,tp=2,pp=2,cp=2,ep=4,zero=1,sp", DEEPSEEK),
        _more("dp=4,tp=2,pp=2,ep=4,etp=2,zero=2,sp,schedule=zb-h1", EXPERTS),
        _more("dp=2,tp=2,cp=4,ep=8,zero=3,sp,dedup,recompute=full", DROPS),
        _more("dp=4,tp=2,ep=2,zero=3,hsdp=2,sp,micro_batches=2", DEEPSEEK),
        _more("dp=2,tp=4,pp=2,sp,zero=3,order=tp-pp-dp", TIED),
    ),
}
CORE, ALL = "core", "all"
NAMES = (CORE, ALL, *SETS)


def matrix(name: str) -> list[Entry]:
    """The entries of a set by its name, one of NAMES."""
    if name in SETS:
        return list(SETS[name])
    return [entry for entries in SETS.values() for entry in entries if entry.core or name == ALL]
