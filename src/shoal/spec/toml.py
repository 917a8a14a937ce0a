"""TOML in and out: files read with errors that name the line, trees of tables and plain values written."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.spec.build import job_to_tree
from shoal.spec.errors import RequestError, nearest, shown
from shoal.spec.job import Job


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tree of a TOML file. Raises RequestError when there is none, or when it cannot be read."""
    file = Path(path)
    name = f"job = {shown(path, limit=1000)}"
    try:
        return tomllib.loads(file.read_bytes().decode())
    except FileNotFoundError:
        raise RequestError("job", f"{name} does not exist; {_neighbour(file)}") from None
    except IsADirectoryError:
        raise RequestError("job", f"{name} is a folder; {_neighbour(file / 'job.toml')}") from None
    except (OSError, ValueError) as error:
        raise RequestError("job", f"{name} {_why(error)}") from None


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}; a file that you may read would do"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text (byte {error.start}); a TOML file would do"
    return f'is not TOML: {error}; lines like steps = 200 or dtype = "float64" would do'


def _neighbour(file: Path) -> str:
    """What could be meant by a file that does not exist."""
    try:
        there = sorted(other.name for other in file.parent.glob("*.toml"))
    except OSError:
        there = []
    near = nearest(file.name, there) or (there[0] if there else None)
    return f"did you mean {file.parent / near}?" if near else "the path of a TOML file would do"


def job_toml(job: Job) -> str:
    """A job as TOML, every field written out; `read_toml` and `job_from_tree` give the same job back."""
    return write_toml(job_to_tree(job))


def write_toml(tree: Mapping[str, Any]) -> str:
    """A tree of tables as TOML. Values are text, booleans, whole and floating numbers, lists of these, or tables."""
    return "\n".join(_table(tree, ())).lstrip("\n")


def _table(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Lines of one table, its own values before the tables inside it, as TOML requires."""
    inner = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    lines = [f"\n[{'.'.join(map(_key, path))}]"] if path else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in tree.items() if key not in inner]
    for key, value in inner.items():
        lines += _table(value, (*path, key))
    return lines if path else [*lines, ""]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # Python writes inf, nan and exponents as TOML does
    if isinstance(value, str):
        return _text(value)
    assert isinstance(value, list | tuple), f"TOML has no {type(value).__name__}"
    return f"[{', '.join(map(_value, value))}]"


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
