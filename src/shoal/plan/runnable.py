"""Which layouts can be run: what a person may write in a Layout but no room of axes/ runs is refused here. No torch."""

from dataclasses import fields

from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout

RUNNABLE = ("dp", "zero", "zero1", "reshard", "hsdp", "micro_batches", "order")


def refuse_unbuilt(layout: Layout) -> None:
    """Raises RequestError for a layout that uses an axis which this version does not run, or one that would do nothing."""
    if layout.hsdp > 1 and not layout.zero:
        raise RequestError(
            "layout.hsdp",
            f"layout.hsdp = {layout.hsdp} has no shards to replicate with zero = 0; zero=3 would do, or hsdp=1",
        )
    plain = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name not in RUNNABLE and value != getattr(plain, field.name):
            raise RequestError(
                f"layout.{field.name}",
                f"layout.{field.name} = {value} cannot be run by this version, which runs data parallelism and ZeRO; "
                f"dp={layout.world} would use as many ranks",
            )
