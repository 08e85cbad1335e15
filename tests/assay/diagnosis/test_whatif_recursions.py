"""Recursions over tables: read by columns, continued after a sequence's end, shares of another turn's state."""

import pytest

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

# least costs over several steps, with a table that another line reads as well


@assay.case(S=[4], N=[5], steps=[3])
def costs(make, S, N, steps):
    return {"start": make.normal(S, N), "cost": make.normal(N, N), "steps": steps}


def cheapest(start, cost, steps, *, turn=lambda t: t):
    for _ in range(steps):
        start = (start.unsqueeze(2) + turn(cost)).amin(1)
    return start + cost.sum(1)


def test_a_table_read_by_columns_in_a_loop_only():
    change = best(lambda **k: cheapest(**k, turn=lambda t: t.mT), cheapest, costs)
    assert change.cause == "transposed" and "reads cost by its columns" in change.text, change
    assert change.exact and change.whole and "in 3 places" in change.text, change


@assay.case(N=[9], V=[4])
def pairs(make, N, V):
    return {"x": make.normal(N), "table": make.normal(V, V), "a": make.integers(0, V, N), "b": make.integers(0, V, N)}


# a chain of probabilities with vectors as states


@assay.case(T=[6], K=[4])
def probabilities(make, T, K):
    return {"p": make.uniform(K) + 0.1, "table": make.uniform(K, K) + 0.1, "seen": make.uniform(T, K) + 0.2}


def likelihood(p, table, seen):
    for step in seen:
        p = (p @ table) * step
    return p.log()
