"""Other values of floating-point arguments that are no tensors, which a candidate may take for constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ....core.tracing import TargetError
from ...declare.case import Case, Make

MOST = 2  # cases to try
_SMALL = 2.0**-6  # a smaller number may be an epsilon, which shows in no result: it becomes half as large as this
_DIGITS = 256  # a number of 8 bits, which every dtype holds exactly


def other_scalars(cases: Sequence[Case], dtype: torch.dtype, seed: int) -> list[Case]:
    """A case for each way of drawing, with other values of its numbers; none where no argument is such a number.

    0, 1 and the sign stay bounds of what was between them, and the order of the numbers stays: a golden takes them.
    """
    further: list[Case] = []
    for base in {case.draw: case for case in reversed(cases)}.values():
        try:
            values = {n: _other(v) for n, v in base.build(dtype, "cpu", seed).items() if _is_number(v)}
            if values:
                case = _with(base, values)
                case.build(dtype, "cpu", seed)
                further.append(case)
        except TargetError:  # outside of the domain that the case declares
            continue
    return further[:MOST]


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value) and value != 0


def _other(value: float) -> float:
    size = abs(value)
    if size < _SMALL:
        other = _SMALL / 2 + size / 4
    elif size <= 1:
        other = 0.75 * size
    else:
        other = 1 + 0.75 * (size - 1)
        other = float(round(other)) if value.is_integer() and round(other) != size else other
    digits, power = math.frexp(other)
    return math.copysign(math.ldexp(round(digits * _DIGITS) / _DIGITS, power), value)


def _with(base: Case, values: dict[str, float]) -> Case:
    def draw(make: Make, **sizes: object) -> dict[str, object]:
        return {**base.draw(make, **sizes), **values}

    label = ",".join(f"{name}={value}" for name, value in {**base.sizes, **values}.items())
    return replace(base, name=f"{base.name.partition('[')[0]}[{label}]", draw=draw)
