"""What data parallelism costs, in closed form: buckets, transfers, memory and time (spec DP-2..5, MEM-1).

Times are seconds, sizes bytes or elements as named. No torch.
"""

from collections.abc import Iterator, Sequence

from shoal.spec.inventory import Parameter, elements
from shoal.transfer import Transfer, traffic

SCALAR = 8  # bytes: token counts and losses travel as one float64


def buckets(parameters: Sequence[Parameter], bucket_bytes: float, width: int) -> list[list[Parameter]]:
    """Parameters in the order in which backward finishes them, cut into runs of at least `bucket_bytes`.

    Backward meets the parameters last to first. A run closes with the parameter that fills it, so that no parameter is
    split; width: bytes per gradient element. Each run is one all-reduce.
    """
    runs: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in reversed(parameters):
        if filled >= bucket_bytes and runs[-1]:
            runs.append([])
            filled = 0
        runs[-1].append(parameter)
        filled += elements(parameter) * width
    return runs


def loss_transfers(ranks: int, rank: int, axis: str = "dp", counts: int = 1) -> Iterator[Transfer]:
    """Transfers of one step that only serve the loss, on one rank of the data axis.

    The global counts of valid tokens before the first backward, one for each update, and the loss that is reported.
    """
    if ranks > 1:
        yield Transfer("forward", axis, "all_reduce", *traffic("all_reduce", counts, SCALAR, ranks, rank))
        yield Transfer("optimizer", axis, "all_reduce", *traffic("all_reduce", 1, SCALAR, ranks, rank))


def gradient_transfers(
    sizes: Sequence[int], ranks: int, rank: int, width: int, micro_batch: int, axis: str = "dp"
) -> Iterator[Transfer]:
    """Transfers of one step's gradients: each bucket once, during the backward of the last micro-batch.

    sizes: elements of the buckets; width: bytes per element. 2 (N-1)/N of the bytes, whatever the batch (spec DP-2).
    """
    if ranks > 1:
        for size in sizes:
            sent, received = traffic("all_reduce", size, width, ranks, rank)
            yield Transfer("backward", axis, "all_reduce", sent, received, micro_batch=micro_batch)


def evaluation_transfers(ranks: int, rank: int, axis: str = "dp") -> Iterator[Transfer]:
    """Transfers of one evaluation on one rank: the sum of losses, then the count of valid tokens."""
    if ranks > 1:
        sent, received = traffic("all_reduce", 1, SCALAR, ranks, rank)
        yield Transfer("evaluate", axis, "all_reduce", 2 * sent, 2 * received, calls=2)


def state_bytes(parameters: int, dtype: str) -> dict[str, int]:
    """Bytes a rank holds between steps, by category, for AdamW (spec MEM-1): the same on every rank, whatever N.

    bfloat16 keeps float32 master weights, so 2 + 2 + 12 per parameter; float32 and float64 update in place.
    """
    weights, gradients, optimizer = {"bfloat16": (2, 2, 12), "float32": (4, 4, 8), "float64": (8, 8, 16)}[dtype]
    return {
        "weights": weights * parameters,
        "gradients": gradients * parameters,
        "optimizer": optimizer * parameters,
    }


def step_time(forward: float, backward: float, communication: float, tail: float) -> float:
    """Seconds of a step whose all-reduces run beside backward; `tail` is the last bucket's, which nothing hides (DP-3)."""
    return forward + max(backward, communication) + tail


def hides(ranks: int, tokens: float, flops: float, bandwidth: float) -> bool:
    """Whether backward is long enough to hide the all-reduce of 2-byte gradients (DP-3).

    tokens: per rank and step; flops: per second and rank; bandwidth: bytes per second, one direction.
    4 Psi (N-1)/N / bandwidth <= 4 Psi tokens / flops, from which Psi falls out.
    """
    return (ranks - 1) / ranks * (flops / bandwidth) / tokens <= 1


def speed_up(ranks: int, one_process: float, exposed: float) -> float:
    """Strong-scaling speed-up T1 / (T1/N + exposed communication), both in seconds (DP-5)."""
    return one_process / (one_process / ranks + exposed)
