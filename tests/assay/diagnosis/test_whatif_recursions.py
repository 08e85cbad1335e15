"""Recursions over tables: read by columns, continued after a sequence's end, shares of another turn's state."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(5)

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


def bigrams(x, table, a, b, *, first=True):
    return x * (table[a, b] if first else table[b, a]) + table[b, 0]


def test_pairs_that_are_looked_up_in_the_other_order():
    change = best(lambda **k: bigrams(**k, first=False), bigrams, pairs)
    assert change.cause == "transposed" and "in the other order" in change.text and change.exact, change


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


class Likelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, table, seen):
        states = [p]
        for step in seen:
            states.append((states[-1] @ table) * step)
        ctx.save_for_backward(table, seen, *states)
        return states[-1].log()

    @staticmethod
    def backward(ctx, g):
        table, seen, *states = ctx.saved_tensors
        g, dtable, dseen = g / states[-1], torch.zeros_like(table), torch.empty_like(seen)
        for t in range(len(seen) - 1, -1, -1):
            dseen[t], g = g * (states[t] @ table), g * seen[t]
            dtable += states[t + 1][:, None] * g
            g = table @ g
        return g, dtable, dseen


def test_states_without_a_batch_read_after_their_step():
    change = best(lambda **k: Likelihood.apply(*k.values()), likelihood, probabilities, "table.grad", backward="auto")
    assert change.exact and change.whole and "from after the step, not from before it" in change.text, change
    assert "wrong_saved_tensor" in (change.cause, *change.also), change


# a sum over the paths of a chain whose steps have their own weights


@assay.case(T=[5], K=[4])
def chains(make, T, K):
    return {"start": make.normal(K), "table": make.normal(K, K), "bend": make.normal(T, K, K)}


def paths(start, table, bend):
    for step in bend:
        start = torch.logsumexp(start.unsqueeze(1) + table + step, 0)
    return start


class Paths(torch.autograd.Function):
    later = 0

    @classmethod
    def of(cls, later):
        return type("Of", (cls,), {"later": later})

    @staticmethod
    def forward(ctx, start, table, bend):
        states = [start]
        for step in bend:
            states.append(torch.logsumexp(states[-1].unsqueeze(1) + table + step, 0))
        ctx.save_for_backward(table, bend, *states)
        return states[-1].clone()

    @classmethod
    def backward(cls, ctx, g):
        table, bend, *states = ctx.saved_tensors
        dtable, dbend = torch.zeros_like(table), torch.zeros_like(bend)
        for t in range(len(bend) - 1, -1, -1):
            after = states[t + 1]
            shares = torch.exp(states[t].unsqueeze(1) + table + bend[t] - after) * g
            dbend[t] = shares
            at = states[max(t + cls.later, 0)]
            dtable += torch.exp(at.unsqueeze(1) + table + bend[t] - after) * g
            g = shares.sum(1)
        return g, dtable, dbend


@pytest.mark.parametrize("later, which", [(1, "after the step"), (-1, "of two steps before")])
def test_shares_recomputed_from_the_state_of_another_step(later, which):
    change = best(lambda **k: Paths.of(later).apply(*k.values()), paths, chains, "table.grad", backward="auto")
    assert change.cause == "wrong_saved_tensor" and which in change.text and change.exact and change.whole, change
    assert change.also == ("shifted", "off_by_one"), change
