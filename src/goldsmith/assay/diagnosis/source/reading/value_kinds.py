"""Kinds of the values that a function's variables hold: observed in one run, as short words.

"f[3,4]"  a tensor or tile of real numbers, its shape in brackets; i: whole numbers, b: truth values, p: pointers
"i[]"     one whole number, be it Python's, torch's or Triton's
"tuple"   anything else, by its type
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import torch

_EDITED = re.compile(r"\.edit\d+$")  # of the name of an edited copy
Kinds = dict[str, dict[str, str]]  # "file:function:line" -> variable -> kind


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "b[]"
    if isinstance(value, int | float):
        return "i[]" if isinstance(value, int) else "f[]"
    if isinstance(value, torch.Tensor):
        letter = "f" if value.is_floating_point() else "b" if value.dtype == torch.bool else "i"
        return f"{letter}[{','.join(map(str, value.shape))}]"
    if type(value).__module__.startswith("triton"):
        return _triton_kind(value)
    return type(value).__name__


def _triton_kind(value: object) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype, shape = value.dtype, [getattr(n, "value", n) for n in value.shape or ()]
        pointer = getattr(value.dtype, "is_ptr", lambda: False)()
        letter = "p" if pointer else "f" if dtype.is_floating() else "b" if str(dtype) == "int1" else "i"
        return f"{letter}[{','.join(map(str, shape))}]"
    inner = getattr(value, "value", None)  # a constexpr
    return kind_of(inner) if isinstance(inner, int | float) else type(value).__name__


@contextmanager
def observing(files: Collection[str], kinds: Kinds) -> Iterator[None]:
    """Context in which the variables of functions of these files are noted whenever one returns."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = _EDITED.sub("", frame.f_code.co_filename) if event == "return" else ""
        if file in files:
            code = frame.f_code
            known = kinds.setdefault(f"{file}:{code.co_name}:{code.co_firstlineno}", {})
            for name, value in list(frame.f_locals.items()):
                try:
                    known[name] = kind_of(value)
                except Exception:  # noqa: BLE001 - the user's objects may raise anything when looked at
                    continue

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def kinds_of(kinds: Mapping[str, Mapping[str, str]], path: str, name: str, lines: range) -> dict[str, str]:
    """The kinds that were noted for a function of that name whose code begins in one of the lines."""
    known: dict[str, str] = {}
    for key, variables in kinds.items():
        place, _, line = key.rpartition(":")
        if place == f"{path}:{name}" and int(line) in lines:
            known |= variables
    return known


def fits(one: str, other: str) -> bool:
    """Whether a value of one kind may stand where the other stands: the same letter, and shapes that broadcast."""
    if "[" not in one or "[" not in other or one[0] != other[0]:
        return one == other
    a, b = (kind[2:-1].split(",") if kind[2:-1] else [] for kind in (one, other))
    return all(x == y or "1" in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))
