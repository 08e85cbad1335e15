"""by_turns: the pairs of two lists of parameters, of which a day runs a part that holds every value of either list."""

from collections.abc import Sequence

import pytest


def by_turns(first: Sequence[object], second: Sequence[object]) -> list:
    parts = min(len(first), len(second))
    return [
        pytest.param(a, b, marks=pytest.mark.sweep(parts, part=(i + j) % parts), id=f"{a}-{b}")
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
