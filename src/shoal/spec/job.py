"""A job: the model, the layout, the machine, the data and the training, in one frozen record. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.errors import RequestError
from shoal.spec.fields import check_fields, described
from shoal.spec.fit import check_fit, sequence_parts
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec

Dtype = Literal["float64", "float32", "bfloat16"]
WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2}  # bytes per element


@dataclass(frozen=True)
class DataSpec:
    """What a job reads. Raises RequestError."""

    path: str = described(
        "", "text file, .jsonl, folder or .tokens file; nothing = the Python standard library's source"
    )
    tokenizer: str = described("bytes", "bytes, or the path of a tokenizer.json")
    sequence: int = described(256, "length of a sequence, tokens", low=1)
    packing: Literal["stream", "packed", "documents"] = described(
        "stream",
        "stream cuts the text anywhere; packed too, but a token sees only its own document; documents makes each one a "
        "sample, cut after `sequence` tokens",
    )
    pad: bool = described(
        False, "fill sequences up, with targets that do not count, to a length that the layout can cut"
    )
    field: str = described("text", "key of the text in each JSONL line")
    eval_fraction: float = described(0.02, "part of the data held out for evaluation", low=0, below=1)
    cache: str = described("", "folder for token files; nothing = the user's cache folder")

    def __post_init__(self) -> None:
        check_fields(self, "data")
        _filled(self, "data", "tokenizer", "field")


@dataclass(frozen=True)
class TrainSpec:
    """How a job trains. Raises RequestError."""

    out: str = described("runs/latest", "folder of the run")
    steps: int = described(200, "optimizer steps", low=1)
    batch: int = described(16, "global batch, sequences per step", low=1)
    dtype: Dtype = described("float32", "type of weights and gradients; bfloat16 keeps float32 master weights")
    seed: int = described(0, "seed of weights, data order and dropout", low=0, below=2**63)
    learning_rate: float = described(1e-3, "peak learning rate", low=0)
    beta1: float = described(0.9, "AdamW: decay of the first moment", low=0, below=1)
    beta2: float = described(0.95, "AdamW: decay of the second moment", low=0, below=1)
    eps: float = described(1e-8, "AdamW: what is added to the root of the second moment", above=0)
    weight_decay: float = described(0.1, "AdamW: weight decay on matrices", low=0)
    clip: float = described(1.0, "largest global gradient norm; 0 = off", low=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = described("cosine", "learning rate after the warm-up")
    warmup: int = described(20, "steps of linear warm-up", low=0)
    min_ratio: float = described(0.1, "last learning rate over the peak", low=0, high=1)
    decay_fraction: float = described(0.2, "wsd: part of the steps in which the rate falls", low=0, high=1)
    eval_every: int = described(0, "steps between evaluations; 0 = only at the end", low=0)
    eval_batches: int = described(8, "batches per evaluation", low=1)
    check_every: int = described(
        0,
        "steps between checks that what several ranks hold is equal, bit for bit, and one at the end; 0 = none",
        low=0,
    )
    max_skipped: int = described(10, "steps in a row that may be skipped for gradients that are not finite", low=1)
    reduce_dtype: Literal["same", "float32"] = described(
        "same",
        "type in which ZeRO sums and keeps gradients: that of the weights, or float32 (2 bytes more per element)",
    )
    bucket_mb: float = described(25.0, "gradients per all-reduce, megabytes (10^6)", above=0)
    offload: Literal["none", "host", "disk"] = described(
        "none", "where optimizer states are kept: on the device, in host memory, in files of the run's folder"
    )
    compile: bool = described(False, "compile the blocks with torch.compile")
    save_every: int = described(0, "steps between checkpoints, and one at the end; 0 = none", low=0)
    keep: int = described(2, "checkpoints that are kept, the newest", low=1)
    async_save: bool = described(True, "write checkpoints from a copy while training goes on")
    resume: str = described(
        "never",
        "auto = go on from the last good checkpoint of the run's folder, if there is one; never; or the path of another",
    )
    weights: str = described("", "safetensors file of whole weights to start from; nothing = fresh ones")
    log: tuple[Literal["tensorboard", "wandb"], ...] = described((), "loggers beside metrics.jsonl")
    log_every: int = described(1, "steps between lines on the screen", low=1)
    sample: int = described(200, "tokens of text sampled at the end of a run; 0 = none", low=0)

    def __post_init__(self) -> None:
        check_fields(self, "train")
        _filled(self, "train", "out", "resume")


@dataclass(frozen=True)
class Job:
    """All of a request. Each part has checked itself; `check` holds them against each other."""

    model: ModelSpec = field(default_factory=ModelSpec)
    layout: Layout = field(default_factory=Layout)
    machine: Machine = field(default_factory=Machine)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)

    def check(self) -> None:
        """Raises RequestError when the parts do not fit each other, as far as no file is needed to tell."""
        filled = self.sequence - self.data.sequence
        check_fit(self.model, self.layout, self.sequence, self.train.batch, filled)
        ids = 257
        if self.data.tokenizer == "bytes" and not self.data.path.endswith(".tokens") and self.model.vocab < ids:
            raise RequestError(
                "model.vocab",
                f"model.vocab = {self.model.vocab} is smaller than the byte tokenizer's {ids} ids; {ids} would do",
            )

    @property
    def sequence(self) -> int:
        """Tokens of a sequence as the layout cuts it: data.sequence, with data.pad filled up to what can be cut."""
        step = sequence_parts(self.layout) if self.data.pad else 1
        return -(-self.data.sequence // step) * step

    @property
    def own_sequence(self) -> int:
        """Tokens of a sequence that a context rank has."""
        return self.sequence // self.layout.cp

    @property
    def micro_batch(self) -> int:
        """Sequences per rank and micro-batch."""
        return self.train.batch // (self.layout.dp * self.layout.micro_batches)


def _filled(spec: DataSpec | TrainSpec, prefix: str, *names: str) -> None:
    """Raises RequestError for texts that are empty and must not be."""
    for name in names:
        if not getattr(spec, name):
            default = getattr(type(spec), name)
            raise RequestError(f"{prefix}.{name}", f"{prefix}.{name} is empty; {default} would do")
