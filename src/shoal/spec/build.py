"""A whole job out of a tree of sections (TOML's or the command line's), and back into one."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.spec import fields
from shoal.spec.convert import build
from shoal.spec.errors import RequestError, nearest, shown
from shoal.spec.fields import Field
from shoal.spec.job import Job
from shoal.spec.layout import layout_tree
from shoal.spec.presets import MODELS

PRESET = Field(
    "model.preset", "choice", None, "a model to start from; other fields of model override it", tuple(MODELS)
)


def fields_of(cls: type) -> Iterator[Field]:
    """Every field that a person may give, in order; for Job also `model.preset`, which is only a way to give others."""
    for field in fields.walk(cls):
        if field.name == "model.name":
            yield PRESET
        yield field


def job_from_tree(tree: Mapping[str, Any]) -> Job:
    """The job of a tree such as {"model": {"preset": "tiny", "layers": 2}, "layout": "dp=2"}.

    A section is a table; layout may be its shorthand. Values may be typed or text. Each part is checked by itself, not
    against the others (Job.check). Raises RequestError for whatever is unknown, of another type or out of range.
    """
    known = [field.name for field in fields_of(Job)]
    sections = fields.hints(Job)
    for name in tree:
        if name not in sections:
            near = nearest(name, sections)
            inside = [field for field in known if field.rpartition(".")[2] == name]
            meant = inside[0] if inside else near
            hint = f"did you mean {meant}?" if meant else f"a job has {', '.join(sections)}"
            raise RequestError(name, f"{shown(name)} is not a section of a job; {hint}")
    parts = {}
    for name, cls in sections.items():
        given = tree.get(name, {})
        if name == "layout" and isinstance(given, str):
            given = layout_tree(given)
        if name == "model" and isinstance(given, str):
            preset = nearest(given, MODELS) or "tiny"
            raise RequestError(name, f"model = {shown(given)} is not a table; model.preset = {preset} would do")
        if name == "model" and isinstance(given, Mapping):
            given = with_preset(given)
        parts[name] = build(cls, given, name, known)
    return Job(**parts)


def with_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model's preset under the given ones; without `preset` the given ones. Raises RequestError."""
    given = {key: value for key, value in model.items() if key != "preset"}
    if "preset" not in model:
        return given
    name = model["preset"]
    if not isinstance(name, str) or name not in MODELS:
        would_do = nearest(str(name), MODELS) or "tiny"
        raise RequestError(
            "model.preset",
            f"model.preset = {shown(name)} is unknown; {would_do} would do (presets: {', '.join(MODELS)})",
        )
    merged = {"name": name, **MODELS[name], **given}
    for inner in ("rope", "moe"):
        if isinstance(given.get(inner), Mapping):
            merged[inner] = {**MODELS[name].get(inner, {}), **given[inner]}
    return merged


def job_to_tree(job: Job) -> dict[str, Any]:
    """The tree of a job, every field written out; fields that are None are left out, since None is their default."""
    return _tree(job)


def _tree(spec: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value is None:
            continue
        if dataclasses.is_dataclass(value):
            tree[field.name] = _tree(value)
        else:
            tree[field.name] = list(value) if isinstance(value, tuple) else value
    return tree
