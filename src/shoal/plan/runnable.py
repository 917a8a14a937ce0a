"""Which layouts can be run: what a person may write in a Layout but no room of axes/ runs is refused here. No torch."""

from dataclasses import fields

from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout

RUNNABLE = (
    "dp",
    "zero",
    "zero1",
    "reshard",
    "hsdp",
    "tp",
    "sp",
    "regather",
    "pp",
    "schedule",
    "v",
    "stages",
    "micro_batches",
    "cp",
    "cp_kind",
    "ulysses",
    "order",
)


def refuse_unbuilt(layout: Layout) -> None:
    """Raises RequestError for a layout that uses an axis which this version does not run, or one that would do nothing."""
    for key, idle, why in (
        ("hsdp", layout.hsdp > 1 and not layout.zero, "has no shards to replicate with zero = 0; zero=3 would do"),
        ("sp", layout.sp and layout.tp_size == 1, "has no tensor ranks to work on; tp=2,sp would do"),
        ("sp", layout.sp and layout.tp_grid, f"does nothing with tp={layout.tp}, where a grid cuts all activations"),
        ("regather", layout.regather and not layout.sp, "has no cut sequence to gather again; sp,regather would do"),
    ):
        if idle:
            off = "false" if key in ("sp", "regather") else "1"
            value = str(getattr(layout, key)).lower()
            raise RequestError(f"layout.{key}", f"layout.{key} = {value} {why}, or {key}={off}")
    plain = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name not in RUNNABLE and value != getattr(plain, field.name):
            raise RequestError(
                f"layout.{field.name}",
                f"layout.{field.name} = {value} cannot be run by this version, which runs data, ZeRO and tensor parallelism; "
                f"dp={layout.world} would use as many ranks",
            )
