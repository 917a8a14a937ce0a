"""What a specification says of its fields: default, help, bounds. Loader, command line and docs read it here."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from shoal.spec.errors import RequestError, refuse_choice, shown


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Where a number may lie; None stands for no bound."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.low, "more than": self.above, "at most": self.high, "less than": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


class Field(NamedTuple):
    """One field as a person sees it.

    name: dotted; type: "int", "float", "bool", "str", "choice", "list", or two of them with "|", such as "int|none".
    default: as it would be typed, None where there is none; choices: the words allowed, () when anything goes.
    """

    name: str
    type: str
    default: str | None
    help: str
    choices: tuple[str, ...] = ()


def described(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its default, help text (units in it) and bounds, which `check_fields` enforces."""
    return dataclasses.field(default=default, metadata={"help": help, "bounds": Bounds(low, above, high, below)})


def derived(help: str, *, low: float | None = None, above: float | None = None) -> Any:
    """A field that follows from the others when it is None; `__post_init__` resolves it, so readers never see None."""
    return dataclasses.field(
        default=None, metadata={"help": help, "bounds": Bounds(low=low, above=above), "derived": True}
    )


def hints(cls: type) -> dict[str, Any]:
    """The annotations of a specification, resolved; a derived field's allows None."""
    found = typing.get_type_hints(cls)
    return {
        field.name: found[field.name] | None if field.metadata.get("derived") else found[field.name]
        for field in dataclasses.fields(cls)
    }


def resolve(spec: Any, **values: Any) -> None:
    """Sets derived fields of a frozen specification that are still None, from its `__post_init__`."""
    for name, value in values.items():
        if getattr(spec, name) is None:
            object.__setattr__(spec, name, value)


def check_fields(spec: Any, prefix: str) -> None:
    """Raises RequestError for the first field that is out of its bounds, not finite, or not among its choices."""
    annotations = hints(type(spec))
    for field in dataclasses.fields(spec):
        name, value, bounds = f"{prefix}.{field.name}", getattr(spec, field.name), field.metadata.get("bounds")
        choices = choices_of(annotations[field.name])
        for word in (value if isinstance(value, tuple) else (value,)) if choices else ():
            if word not in choices:
                raise refuse_choice(name, word, choices, typed(field.default))
        if isinstance(value, str) and "\0" in value:
            raise RequestError(
                name, f"{name} = {shown(value)} holds a null byte; {shown(field.default) or 'text'} would do"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        would_do = f"{shown(field.default)} would do"
        if not math.isfinite(value):
            raise RequestError(name, f"{name} = {value} is not a finite number; {would_do}")
        if bounds and not bounds.hold(value):
            raise RequestError(name, f"{name} = {shown(value)} must be {bounds}; {would_do}")


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The words that a Literal allows, alone or as the elements of a tuple; () for other annotations."""
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def walk(cls: type, prefix: str = "") -> Iterator[Field]:
    """Every field of a specification and of those inside it, in order, with dotted names below `prefix`."""
    annotations = hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}.{field.name}" if prefix else field.name
        annotation = annotations[field.name]
        if inner := inside(annotation):
            yield from walk(inner, name)
        else:
            help = field.metadata["help"]
            yield Field(name, _type_text(annotation), typed(field.default), help, choices_of(annotation))


def inside(annotation: Any) -> type | None:
    """The specification that a field holds, also where it may be None; None for a plain value."""
    options = typing.get_args(annotation) or (annotation,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return typing.cast(type, found[0]) if found else None


def typed(default: Any) -> str | None:
    """A default as one would type it on the command line."""
    if default is None:
        return None
    return ",".join(default) if isinstance(default, tuple) else shown(default)


def _type_text(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return "|".join(_type_text(part) for part in typing.get_args(annotation))
    if origin is tuple:
        return "list"
    if origin is Literal:
        return "choice"
    return "none" if annotation is type(None) else annotation.__name__
