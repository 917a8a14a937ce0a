"""Tensor and sequence parallelism. `parallelize` cuts any module; it loads torch when it is first asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.axes.tensor.any_module import parallelize

__all__ = ["parallelize"]


def __getattr__(name: str) -> Any:
    if name == "parallelize":
        from shoal.axes.tensor.any_module import parallelize

        return parallelize
    raise AttributeError(f"module {__name__} has no attribute {name}")
