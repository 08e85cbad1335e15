"""Scalars of the case, replaced by each other, by their complement, or by one more or one less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from torch import Tensor

from .golden_edit import GoldenEdit, NamedEdit

_LENGTHS = 6  # lengths of axes to try
Scalars = Mapping[str, Any]
Inputs = Mapping[str, Tensor]


def edits(scalars: Scalars, inputs: Inputs) -> Iterator[NamedEdit]:
    """A scalar may be the length of an axis of one of the inputs."""
    numbers = {n: v for n, v in scalars.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    lengths = sorted({n for t in inputs.values() for n in t.shape})
    for name, value in numbers.items():
        yield from _whole(name, value, lengths) if isinstance(value, int) else _real(name, value)
    for (a, u), (b, v) in combinations(numbers.items(), 2):
        if u != v and type(u) is type(v):
            params = {"exchanged": [a, b], "factor": b, "named": b}
            yield _edit("wrong_factor", f"{b} is read in place of {a}", {a: v}, params, 0.55)
            yield _edit("wrong_factor", f"{a} is read in place of {b}", {b: u}, params, 0.55)
            yield _edit("swapped_results", f"{a} and {b} are exchanged", {a: v, b: u}, params, 0.5)


def _whole(name: str, value: int, lengths: list[int]) -> Iterator[NamedEdit]:
    for step in (1, -1):
        text = f"{name} is {value + step}, one too {'high' if step > 0 else 'low'}"
        yield _edit("off_by_one", text, {name: value + step}, {"input": name}, 0.6, ("wrong_factor",))
    yield _edit("wrong_factor", f"{name} is doubled", {name: 2 * value}, {"factor": name, "named": "2"}, 0.4)
    yield _edit("wrong_factor", f"{name} is halved", {name: value // 2}, {"factor": name, "named": "1/2"}, 0.4)
    for n in [n for n in lengths if n > value > 0][:_LENGTHS]:
        text = f"{name} is ignored: all {n} positions count, not {value}"
        yield _edit("wrong_mask", text, {name: n}, {"input": name}, 0.5, ("truncated_reduction",))


def _real(name: str, value: float) -> Iterator[NamedEdit]:
    for cause, text, other, named, prior in (
        ("missing_term", "counts as zero", 0.0, "0", 0.5),
        ("wrong_factor", "counts as one", 1.0, f"1/{name}", 0.55),
        ("wrong_factor", f"counts as 1 - {name}", 1.0 - value, f"1 - {name}", 0.6),
        ("sign_flip", "has the other sign", -value, "-1", 0.5),
        ("wrong_factor", "is squared", value * value, name, 0.45),
        ("wrong_factor", "is taken by its root", abs(value) ** 0.5, f"1/sqrt({name})", 0.4),
        ("wrong_factor", "is taken by its inverse", 1.0 / value if value else value, f"1/{name}^2", 0.4),
    ):
        if other != value:
            yield _edit(cause, f"{name} {text}", {name: other}, {"factor": name, "term": name, "named": named}, prior)


def _edit(
    cause: str, text: str, scalars: dict[str, object], params: dict, prior: float, also: tuple[str, ...] = ()
) -> NamedEdit:
    return NamedEdit(cause, text, GoldenEdit((), scalars=tuple(scalars.items())), prior, params, also)
