"""Recursions over tables: read by columns, continued after a sequence's end, shares of another turn's state."""

import pytest
import torch

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


# a state that decays over each row's own steps


@assay.case(B=[4], T=[7], D=[3])
def rows(make, B, T, D):
    length = make.integers(2, T, B)
    length[0], length[1] = T, T - 3
    return {"x": make.normal(B, T, D), "w": make.normal(D), "length": length}


def faded(x, w, length):
    out = []
    for row, n in zip(x, length.tolist(), strict=True):
        state = torch.zeros_like(w)
        for t in range(n):
            state = torch.tanh(w * state + row[t])
        out.append(state * row[:n].sum(0) + torch.sin(row[n - 1]))
    return torch.stack(out)


def padded(x, w, length, *, state_to_the_end=False, last_of_all=False):
    state, total = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        inside = (t < length).unsqueeze(1)
        step = torch.tanh(w * state + x[:, t])
        state = step if state_to_the_end else torch.where(inside, step, state)
        total = total + torch.where(inside, x[:, t], 0.0)
    last = x[:, -1] if last_of_all else x[torch.arange(len(x)), length - 1]
    return state * total + torch.sin(last)


@pytest.mark.parametrize(
    "mistake, cause, text",
    [
        ({"state_to_the_end": True}, "wrong_mask", "continues past the sequence's end"),
        ({"last_of_all": True}, "invalid_index", "is taken at the padded end"),
    ],
)
def test_one_line_that_treats_every_sequence_as_full_is_explained(mistake, cause, text):
    change = best(lambda **k: padded(**k, **mistake), faded, rows)
    assert change.cause == cause and text in change.text and "every number of length counts as T, 7" in change.text, (
        change
    )
    assert change.exact and change.whole, change


# a chain of probabilities with vectors as states


@assay.case(T=[6], K=[4])
def probabilities(make, T, K):
    return {"p": make.uniform(K) + 0.1, "table": make.uniform(K, K) + 0.1, "seen": make.uniform(T, K) + 0.2}


def likelihood(p, table, seen):
    for step in seen:
        p = (p @ table) * step
    return p.log()
