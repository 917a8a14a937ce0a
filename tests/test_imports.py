"""Imports point one way, and what plans, shows or refuses never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

# Each room may import from the rooms before it, and from itself. A room is named by the longest prefix that fits.
ORDER = [
    "spec",
    "transfer",
    "mesh",
    "axes, planned",
    "plan",
    "comm",
    "kernels",
    "axes",
    "model",
    "train",
    "launch",
    "verify",
    "cli",
]
WITHOUT_TORCH = ("spec", "transfer", "mesh", "axes, planned", "plan")

# What a room of axes/ plans with, torch-free, by the file's or the folder's name; the rest of a room runs.
PLANNED = {
    "card", "piece", "memory", "cost", "cut", "order", "schedules", "check", "communication", "dependencies", "simulate",
    "partition", "live", "evaluation", "stage", "tiles",
}  # fmt: skip


def room_of(module: str) -> str | None:
    """The room of a module such as shoal.axes.data.cost; None for shoal itself."""
    parts = module.split(".")[1:]
    if parts and parts[0] == "axes" and PLANNED & set(parts):
        return "axes, planned"
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ORDER:
            return ".".join(parts[:length])
    return None


def modules():
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = ROOT.parent.joinpath(*node.module.split("."))
            for alias in node.names:
                named = inside / alias.name
                is_module = named.is_dir() or named.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_point_one_way(module, file):
    room = room_of(module)
    for imported in imports(file):
        if imported.startswith("shoal.") and room is not None:
            target = room_of(imported)
            assert target is not None, f"{imported} is in no known room"
            assert ORDER.index(target) <= ORDER.index(room), f"{module} ({room}) imports {imported} ({target})"


def test_what_plans_never_loads_torch():
    names = [name for name, file in modules() if room_of(name) in WITHOUT_TORCH or file.name == "__init__.py"]
    assert len(names) > 25
    names += ["shoal.comm.ledger", "shoal.comm.ring", "shoal.verify.audit", "shoal.verify.compare", "shoal.cli.main"]
    program = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
