"""Sizes that the problem does not declare, inside of its declared domain.

A candidate may branch on the sizes that it knows. Between the smallest and the largest size of an axis lie others:
first multiples of what the declared ones have in common, then others; powers of two where all of them are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from ...declare.case import Case

MOST = 4  # cases to try


def undeclared(cases: Sequence[Case], seed: int) -> list[Case]:
    """Cases like the declared ones, with sizes between theirs; none for literal tensors or single sizes."""
    order = random.Random(seed)
    further: list[Case] = []
    for draw in dict.fromkeys(c.draw for c in cases if not c.given):
        alike = [c for c in cases if c.draw is draw]
        names = [n for n, v in alike[0].sizes.items() if type(v) is int]
        for common in (True, False):
            between = {n: _between(sorted({_whole(c, n) for c in alike}), common) for n in names}
            if not any(between.values()):
                continue
            base = order.choice(alike)
            sizes = {**base.sizes, **{n: order.choice(values) for n, values in between.items() if values}}
            label = ",".join(f"{k}={v}" for k, v in sizes.items())
            case = replace(base, name=f"{base.name.partition('[')[0]}[{label}]", sizes=sizes)
            if all(case.name != c.name for c in (*cases, *further)):
                further.append(case)
    return further[:MOST]


def _whole(case: Case, name: str) -> int:
    value = case.sizes[name]
    return value if type(value) is int else 0


def _between(declared: list[int], common: bool) -> list[int]:
    """Whole numbers between the declared ones; common: multiples of what these have in common, else others."""
    large = [n for n in declared if n > 0]
    if len(large) < 2:
        return []
    step = math.gcd(*large)
    if all(n & (n - 1) == 0 for n in large):
        values = [2**k for k in range(large[0].bit_length(), large[-1].bit_length())]
    else:
        values = [n for n in range(large[0] + 1, large[-1]) if (n % step == 0) == (common or step == 1)]
    return [n for n in values if n not in declared]
