"""Which layouts can be run: what a person may write in a Layout but no room of axes/ runs is refused here. No torch."""

from dataclasses import fields

from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout

RUNNABLE = ("dp", "zero", "zero1", "reshard", "hsdp", "micro_batches", "order")


def refuse_unbuilt(layout: Layout) -> None:
    """Raises RequestError for a layout that uses an axis which this version does not run."""
    plain = Layout()
    for field in fields(Layout):
        value = getattr(layout, field.name)
        if field.name not in RUNNABLE and value != getattr(plain, field.name):
            raise RequestError(
                f"layout.{field.name}",
                f"layout.{field.name} = {value} cannot be run by this version, which runs data parallelism; "
                f"dp={layout.world} would use as many ranks",
            )
