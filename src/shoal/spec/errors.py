"""What a person is told when a request cannot be: one line with the field, the reason and a value that would do."""

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any


class RequestError(ValueError):
    """A request that cannot be met. `field`: dotted name of the field to change; str(): the one line to show."""

    def __init__(self, field: str, line: str):
        super().__init__(line)
        self.field = field

    def __reduce__(self) -> tuple:
        # Ranks hand their exceptions to the parent process; the default would call RequestError(line) there.
        return type(self), (self.field, str(self))


def shown(value: Any, limit: int = 60) -> str:
    """A value as a person wrote it, on one line and at most `limit` characters long."""
    text = ("true" if value else "false") if isinstance(value, bool) else "none" if value is None else str(value)
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most probably stands for, whatever the case; None when none is close."""
    by_lower = {name.lower(): name for name in known}
    alike = 0.5 if len(word) < 4 else 0.6  # one of two letters, or the better part of a longer word
    close = difflib.get_close_matches(word.lower(), by_lower, 1, alike)
    return by_lower[close[0]] if close else None


def refuse_choice(name: str, value: Any, choices: Sequence[str], default: str | None = None) -> RequestError:
    """The error for a value that is not among the choices; it names the nearest, else `default` or the first."""
    near = nearest(str(value), choices)
    hint = f"did you mean {near}?" if near else f"{default or choices[0]} would do"
    return RequestError(name, f"{name} = {shown(value)} is not one of {', '.join(choices)}; {hint}")


def unknown_field(name: str, known: Iterable[str]) -> RequestError:
    """The error for a dotted name that is no field; `known` are the dotted names there are."""
    names = list(known)
    section, _, leaf = name.rpartition(".")
    leaves = {other.removeprefix(f"{section}."): other for other in names if other.startswith(f"{section}.")}
    elsewhere = [other for other in names if other.rpartition(".")[2] == leaf]
    near = nearest(leaf, leaves)
    meant = elsewhere[0] if elsewhere else leaves[near] if near else None
    hint = f"did you mean {meant}?" if meant else f"{section} has {', '.join(leaves)}"
    return RequestError(name, f"{shown(name)} is not a field of {section}; {hint}")


def divisors(number: int) -> list[int]:
    """The divisors of a positive whole number, ascending; beyond 10^12 only those up to 10^6 and their partners."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def alternatives(values: Iterable[int], near: int) -> str:
    """Numbers as a person lists them, "1, 2 or 4": the eight closest to `near` when there are more."""
    closest = sorted(sorted(set(values), key=lambda value: abs(value - near))[:8])
    *first, last = map(str, closest)
    return f"{', '.join(first)} or {last}" if first else last


def multiples_around(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, below and above, as words."""
    below = value // step * step
    return alternatives([below, below + step] if below else [step], value)
