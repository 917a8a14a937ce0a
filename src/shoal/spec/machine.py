"""The machine a job runs on: devices, their peak, and how its processes meet. No torch."""

from dataclasses import dataclass
from typing import Literal

from shoal.spec.errors import RequestError, nearest, shown
from shoal.spec.fields import check_fields, described
from shoal.spec.presets import MACHINES

LOCAL = "local"


@dataclass(frozen=True)
class Machine:
    """Where a job runs. Raises RequestError for a name that is no preset and comes without a peak of its own."""

    name: str = described(
        LOCAL, f"machine: {', '.join(MACHINES)}, local (peak unknown), or any name together with peak_tflops"
    )
    device: Literal["auto", "cpu", "cuda"] = described("auto", "device of every rank; auto = a GPU when there is one")
    peak_tflops: float | None = described(
        None, "peak of one device in the job's dtype, dense, TFLOP/s; none = the named machine's, else unknown", above=0
    )
    port: int = described(0, "port at which the ranks meet; 0 = any free one", low=0, high=65535)
    timeout_s: float = described(600.0, "longest wait for other ranks, seconds", above=0, high=10**8)
    threads: int = described(0, "threads per rank; 0 = cores / ranks on this host", low=0, high=4096)

    def __post_init__(self) -> None:
        check_fields(self, "machine")
        if self.name not in (*MACHINES, LOCAL) and self.peak_tflops is None:
            near = nearest(self.name, (*MACHINES, LOCAL))
            hint = f"did you mean {near}?" if near else f"{LOCAL} would do"
            raise RequestError(
                "machine.name",
                f"machine.name = {shown(self.name)} is unknown; {hint} (known: {', '.join(MACHINES)}, {LOCAL}; "
                f"any other name needs machine.peak_tflops)",
            )

    def peak(self, dtype: str) -> float | None:
        """Peak of one device for matrix products in `dtype`, flop/s, dense; None when nobody knows it."""
        tflops = self.peak_tflops if self.peak_tflops is not None else MACHINES.get(self.name, {}).get(dtype)
        return None if tflops is None else tflops * 1e12
