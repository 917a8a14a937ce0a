"""Trees of plain values, from TOML (typed) or a command line (text), turned into specifications, strictly."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from shoal.spec.errors import RequestError, refuse_choice, shown, unknown_field
from shoal.spec.fields import choices_of, hints, inside, typed, walk

Spec = TypeVar("Spec")

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def build(cls: type[Spec], tree: Any, section: str, known: Sequence[str] = ()) -> Spec:
    """`cls` from a tree of its fields; what is not given keeps its default.

    section: dotted name of the tree, for errors; known: all dotted names to look for a misspelt one in.
    Raises RequestError for a tree that is no table, a field that does not exist or a value that is none of its type.
    """
    names = list(known) or [field.name for field in walk(cls, section)]
    specification = typing.cast(Any, cls)
    if not isinstance(tree, Mapping):
        first = next(walk(cls, section))
        raise RequestError(
            section, f"{section} = {shown(tree)} is not a table; {first.name} = {shown(first.default)} would do"
        )
    fields = {field.name: field for field in dataclasses.fields(specification)}
    for key in tree:
        if key not in fields:
            raise unknown_field(f"{section}.{key}", names)
    annotations = hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name, annotation = f"{section}.{key}", annotations[key]
        inner = inside(annotation)
        if inner is None:
            values[key] = convert(value, annotation, name, fields[key].default)
        elif annotation is not inner and _is_none(value):
            values[key] = None
        else:
            values[key] = build(inner, value, name, names)
    return cls(**values)


def convert(value: Any, annotation: Any, name: str, default: Any) -> Any:
    """`value` as the annotation wants it; text is read, other types are not bent. Raises RequestError."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return _union(value, typing.get_args(annotation), name, default)
    if origin is Literal:
        if value not in typing.get_args(annotation):
            raise refuse_choice(name, value, typing.get_args(annotation), typed(default))
        return value
    if origin is tuple:
        return _words(value, annotation, name, default)
    return {int: _whole, float: _number, bool: _truth, str: _text}[annotation](value, name, default)


def _union(value: Any, options: Sequence[Any], name: str, default: Any) -> Any:
    """X | None, where "none" stands for None, and int | str, where a whole number is taken as one."""
    if type(None) in options and _is_none(value):
        return None
    refusals = []
    for option in options:
        try:
            if option is not type(None):
                return convert(value, option, name, default)
        except RequestError as refused:
            refusals.append(refused)
    raise refusals[0]


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() == "none")


def _whole(value: Any, name: str, default: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(value if isinstance(value, str) else "")
    except ValueError:
        raise RequestError(name, f"{name} = {shown(value)} is not a whole number; {shown(default)} would do") from None


def _number(value: Any, name: str, default: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RequestError(name, f"{name} = {shown(value)} is too large; {shown(default)} would do") from None
    try:
        return float(value if isinstance(value, str) else "")
    except ValueError:
        raise RequestError(name, f"{name} = {shown(value)} is not a number; {shown(default)} would do") from None


def _truth(value: Any, name: str, default: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in YES + NO:
        raise RequestError(name, f"{name} = {shown(value)} is not true or false; {shown(default)} would do")
    return word in YES


def _text(value: Any, name: str, default: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(name, f'{name} = {shown(value)} is not text; "{shown(value)}" in quotes would do')
    try:
        value.encode()
    except UnicodeEncodeError:
        # A path that is not UTF-8 arrives with surrogates; it could be used but not written into job.toml.
        line = f"{name} = {shown(value)} is not valid UTF-8; a name of plain letters would do"
        raise RequestError(name, line) from None
    return value


def _words(value: Any, annotation: Any, name: str, default: Any) -> tuple[str, ...]:
    """A list of words, or one text with commas between them; "" and "none" are no words."""
    if isinstance(value, str):
        value = [] if value.strip().lower() in ("", "none") else [word.strip() for word in value.split(",")]
    if not isinstance(value, list | tuple):
        words = ",".join(choices_of(annotation))
        raise RequestError(name, f"{name} = {shown(value)} is not a list of words; {words} would do")
    (element, _) = typing.get_args(annotation)
    return tuple(convert(word, element, name, None) for word in value)
