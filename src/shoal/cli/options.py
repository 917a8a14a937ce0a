"""Command line to Job: every field of a job is an option, on top of a TOML file, on top of presets."""

import argparse
import difflib
import json
import sys
from typing import Any, NoReturn

from shoal.spec.build import fields_of, job_from_tree
from shoal.spec.convert import build
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.layout import Layout, layout_tree
from shoal.spec.toml import read_toml

# What people type most, without the section's name.
SHORT = {"out": "train.out", "steps": "train.steps", "dtype": "train.dtype", "seed": "train.seed"}
WHOLE = {
    "layout": ("KEY=N,...", "the layout in short: dp=2,tp=2,sp,zero=1"),
    "model": ("PRESET", "a model preset, the same as --model.preset"),
    "machine": ("NAME", "a machine preset, the same as --machine.name"),
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line that names a nearby option, raised as RequestError."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        if "unrecognized" not in message:
            raise RequestError(self.prog, f"{message} (see {self.prog} --help)")
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        raise RequestError(unknown, f"{unknown} is not an option of {self.prog}; {hint}")


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Adds JOB.toml, the shorthands and one option per field of Job."""
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="a job file; options override it")
    for name, (shape, words) in WHOLE.items():
        parser.add_argument(f"--{name}", dest=name, metavar=shape, help=words)
    for short, name in SHORT.items():
        parser.add_argument(f"--{short}", dest=short, metavar=short.upper(), help=f"the same as --{name}")
    sections: dict[str, Any] = {}
    for field in fields_of(Job):
        section = field.name.split(".")[0]
        if section not in sections:
            words = "without a model, or beside a file that names no preset, the preset demo lies under these"
            sections[section] = parser.add_argument_group(section, words if section == "model" else None)
        group = sections[section]
        flag = {"nargs": "?", "const": "true"} if field.type == "bool" else {}
        default = f" (default: {field.default})" if field.default not in ("", None) else ""
        choices = f" [{', '.join(field.choices)}]" if field.choices else ""
        group.add_argument(
            f"--{field.name}",
            dest=field.name,
            default=argparse.SUPPRESS,
            metavar=field.type.upper(),
            help=f"{field.help}{choices}{default}".replace("%", "%%"),
            **flag,
        )
    parser.add_argument("--dump-config", action="store_true", help="print the whole job as TOML and do nothing")


def read_job(arguments: argparse.Namespace, base: dict | None = None, ranks: int | None = None) -> Job:
    """The Job that a parsed command line asks for: `base`, then the job file, then shorthands, then single fields.

    Where nobody chose a model and the layout has expert ranks, the base's preset is the one of the same size with experts.
    ranks: how many are there already, such as torchrun's; where nobody says how many the data axis has, it gets what the
    other axes leave of them. Raises RequestError for whatever cannot be: unknown fields, wrong values, a missing file.
    """
    given = vars(arguments)
    tree: dict[str, Any] = {section: dict(fields) for section, fields in (base or {}).items()}
    file = read_toml(given["job"]) if given.get("job") else {}
    for section, fields in file.items():
        _put_section(tree, section, fields)
    if given.get("layout") is not None:
        if not given["layout"].strip(", "):
            raise RequestError("layout", "--layout is empty; dp=1 would be one process, dp=2 two")
        tree["layout"] = layout_tree(given["layout"])
    if given.get("model"):
        tree["model"] = {"preset": given["model"]}
    if given.get("machine"):
        tree["machine"] = {"name": given["machine"]}
    for name, value in given.items():
        field = SHORT.get(name, name)
        if value is not None and "." in field:
            *path, last = field.split(".")
            place = tree
            for part in path:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):  # a job file that says model = "tiny": the loader tells what is wrong
                    return job_from_tree(tree)
            place[last] = value
    chosen = "model" in file or given.get("model") or given.get("model.preset")
    if base and not chosen and _expert_ranks(tree.get("layout")):
        tree["model"]["preset"] = f"moe-{base['model']['preset']}"
    if ranks is not None:
        _spread(tree, ranks)
    return job_from_tree(tree)


def given_fields(arguments: argparse.Namespace) -> set[str]:
    """The dotted names of the fields that a person gave, by file or option; a preset counts as model.preset."""
    job = vars(arguments).get("job")
    file = read_toml(job) if job else {}
    names = {f"{section}.{field}" for section, fields in file.items() if isinstance(fields, dict) for field in fields}
    return names | given_options(arguments)


def given_options(arguments: argparse.Namespace) -> set[str]:
    """Those of them that a person gave by option."""
    given = vars(arguments)
    options = {SHORT.get(name, name) for name, value in given.items() if value is not None}
    names = {name for name in options if "." in name}  # beside these there are options that are no fields
    return names | ({"model.preset"} if given.get("model") else set())


def _expert_ranks(layout: Any) -> bool:
    """Whether a tree of layout's fields, text or typed, asks for more than one."""
    ranks = str(layout.get("ep", 1)).strip() if isinstance(layout, dict) else "1"
    return ranks.isdecimal() and int(ranks) > 1


def _spread(tree: dict[str, Any], ranks: int) -> None:
    """Gives the data axis of a tree's layout what the other axes leave of `ranks`, unless it has a size or they do not fit."""
    layout = tree.get("layout", {})
    if not isinstance(layout, dict) or str(layout.get("dp") or 0).strip().lower() not in ("0", "none"):
        return
    others = build(Layout, {axis: layout[axis] for axis in ("tp", "cp", "pp") if axis in layout}, "layout").world
    if ranks % others == 0:
        tree["layout"] = {**layout, "dp": ranks // others}


def _put_section(tree: dict[str, Any], section: str, fields: Any) -> None:
    """A job file's section on top of the base: a preset or a layout written out replaces the base's."""
    if section == "layout":
        tree[section] = layout_tree(fields) if isinstance(fields, str) else fields
    elif isinstance(fields, dict) and "preset" not in fields:
        tree[section] = {**tree.get(section, {}), **fields}
    else:
        tree[section] = fields


def print_json(document: dict) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
