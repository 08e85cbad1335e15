"""Names for measured numbers: small integers, sizes, scalars, their squares, reciprocals and products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

_SMALL = {0.0: "0", 1.0: "1", -1.0: "-1", 2.0: "2", -2.0: "-2", 0.5: "1/2", -0.5: "-1/2"}
_CONSTANTS = {"ln 2": math.log(2.0), "sqrt(2)": math.sqrt(2.0), "pi": math.pi}
_ELEMENTS = 8  # elements of an input, at most, that may name a number one by one
_LARGEST = 1 << 20
_LENGTHS = 4  # axis lengths, if no size is known


@dataclass(frozen=True)
class NamedNumber:
    """The simplest name of a number, its exact value, and every other name that fits equally well."""

    value: float
    name: str
    also: tuple[str, ...] = ()


def known(scalars: Mapping[str, object], sizes: Mapping[str, object], inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Names and values of a case's sizes, scalars and elements of small inputs; without 0, 1 and -1, which explain
    nothing.
    """
    table: dict[str, float] = {}
    for name, value in [*scalars.items(), *sizes.items()]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.setdefault(name, float(value))
    for name, tensor in inputs.items():
        if tensor.is_floating_point() and 0 < tensor.numel() <= _ELEMENTS:
            values = tensor.detach().double().flatten().tolist()
            single = len(values) == 1
            table.update({name if single else f"{name}[{i}]": v for i, v in enumerate(values)})
    if not sizes:  # a case of plain tensors has only the lengths of its axes
        lengths = {n: f"{name}.shape[{i}]" for name, t in reversed(list(inputs.items())) for i, n in enumerate(t.shape)}
        table.update({label: float(n) for n, label in list(lengths.items())[:_LENGTHS] if n not in table.values()})
    return {n: v for n, v in table.items() if math.isfinite(v) and v not in (0.0, 1.0, -1.0)}


def name(value: float, tolerance: float, numbers: Mapping[str, float]) -> NamedNumber | None:
    """The name of `value`, known to +- tolerance; simpler names come first. None if no simple number is that close."""
    fitting: dict[str, float] = {}
    best: float | None = None
    for label, number in _candidates(value, numbers):
        if abs(number - value) <= tolerance:
            fitting.setdefault(label, number)
            best = number if best is None else best
    if best is None:
        return None
    first, *others = fitting
    return NamedNumber(best, first, tuple(others[:6]))


def _candidates(value: float, numbers: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for number, label in _SMALL.items():
        yield label, number
    singles = list(numbers.items())
    yield from singles
    yield from ((f"-{n}", -v) for n, v in singles)
    yield from ((f"1/{n}", 1 / v) for n, v in singles)
    yield from ((f"{n}^2", v * v) for n, v in singles)
    nearest = round(value) if math.isfinite(value) else 0
    if 1 < abs(nearest) <= _LARGEST:
        yield str(nearest), float(nearest)
    if value and 1 < abs(round(1 / value)) <= 4096:
        yield f"1/{round(1 / value)}", 1.0 / round(1 / value)
    for n, v in singles:
        yield f"1/{n}^2", 1 / (v * v)
        yield f"1-{n}", 1 - v
        yield f"sqrt({n})", math.sqrt(v) if v > 0 else math.inf
        yield f"1/sqrt({n})", 1 / math.sqrt(v) if v > 0 else math.inf
        if v == round(v) and v > 2:  # means and standard deviations over one number less
            for label, number in ((f"({n}-1)/{n}", (v - 1) / v), (f"{n}/({n}-1)", v / (v - 1))):
                yield label, number
                yield f"sqrt({label})", math.sqrt(number)
        if 0 < v < 1:
            yield f"1/(1-{n})", 1 / (1 - v)
            yield f"sqrt(1-{n})", math.sqrt(1 - v)
            yield f"1/sqrt(1-{n})", 1 / math.sqrt(1 - v)
    for label, number in _CONSTANTS.items():
        yield label, number
        yield f"1/{label}", 1 / number
    for i, (n, v) in enumerate(singles):
        for m, w in singles[i + 1 :]:
            yield f"{n}*{m}", v * w
            yield f"1/({n}*{m})", 1 / (v * w)
            yield f"{n}/{m}", v / w
            yield f"{m}/{n}", w / v
            yield f"1-{n}*{m}", 1 - v * w
    if value and math.isfinite(value):
        power = math.log2(abs(value - 1)) if value != 1 else 0.0
        if power == power and abs(power) < 64 and round(power) < -1:
            sign = "+" if value > 1 else "-"
            yield f"1{sign}2^{round(power)}", 1 + math.copysign(2.0 ** round(power), value - 1)
        whole = round(math.log2(abs(value)))
        yield f"{'-' if value < 0 else ''}2^{whole}", math.copysign(2.0**whole, value)
