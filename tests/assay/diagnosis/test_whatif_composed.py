"""Changed goldens: block results assembled wrongly, positions assigned in turn, stale reads, factors of one addend."""

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

BLOCK = 4


def explained(target, tensor="y"):
    examination = session_of(target, ("values", "ensemble"))
    changes = explain(examination, tensor, examination.first.outputs[tensor], examination.first)
    assert changes, f"nothing explains {tensor}"
    return changes


def best(target):
    return explained(target)[0]


# blocks


@assay.case(T=[3], N=[11])
def rows(make, T, N):
    return {"x": make.normal(T, N) + 1}


def spread(x):
    """A variance that torch computes with several operators."""
    return ((x - x.sum(1, keepdim=True) / x.shape[1]) ** 2).sum(1) / x.shape[1]


def parts(x):
    return [(spread(part), part.shape[1]) for part in x.split(BLOCK, 1)]


@pytest.mark.parametrize(
    "kernel, cause, text",
    [
        (lambda x: parts(x)[-1][0], "overwritten_accumulator", "the last block replaces all blocks before it"),
        (lambda x: torch.stack([v for v, _ in parts(x)]).mean(0), "wrong_factor", "all blocks have the same weight"),
        (lambda x: sum(v * n for v, n in parts(x)) / x.shape[1], "missing_term", "without the terms between blocks"),
    ],
    ids=["last", "alike", "averaged"],
)
def test_results_of_blocks_are_put_together_wrongly(kernel, cause, text):
    assert assay.check(assay.Target(spread, spread, cases=rows, backward=None), raises=False).ok
    change = best(assay.Target(kernel, spread, cases=rows, backward=None))
    assert (change.cause, change.exact, change.params["block"]) == (cause, True, BLOCK) and text in change.text


@assay.case(T=[10], D=[3])
def steps(make, T, D):
    return {"x": make.normal(T, D), "keep": make.uniform(T, D)}


def decayed(x, keep):
    """h[t] = keep[t] h[t-1] + x[t] as one product, so that there is no loop whose turns could be changed."""
    log = keep.log().cumsum(0)
    share = torch.exp(log[:, None] - log).masked_fill(torch.ones(len(x), len(x)).triu(1).bool()[..., None], 0)
    return (share * x).sum(1)


def in_chunks(x, keep):
    out = []
    for t in range(len(x)):
        out.append(x[t] if t % BLOCK == 0 else keep[t] * out[-1] + x[t])
    return torch.stack(out)


def test_a_recurrence_restarts_from_zero_in_every_chunk():
    change = explained(assay.Target(in_chunks, decayed, cases=steps, backward=None))
    assert change[0].cause == "missing_term" and change[0].exact
    assert any(
        what.text == "in blocks of 4 of x and keep along axis 0 each block ignores the blocks before it"
        for what in change
    )


# places in turn


@assay.case(H=[6], KV=[2], T=[5], D=[3])
def heads(make, H, KV, T, D):
    return {"q": make.normal(H, D), "k": make.normal(KV, T, D)}


def test_heads_are_taken_in_turn():
    def attend(q, k, head):
        return torch.stack([torch.softmax(k[head(h, len(q), len(k))] @ q[h], 0) for h in range(len(q))])

    golden = lambda q, k: attend(q, k, lambda h, n, kv: h // (n // kv))  # noqa: E731
    kernel = lambda q, k: attend(q, k, lambda h, n, kv: h % kv)  # noqa: E731
    change = best(assay.Target(kernel, golden, cases=heads, backward=None))
    assert (change.cause, change.exact) == ("permuted", True) and "assigned in turn to 2 groups" in change.text
    assert set(change.also) == {"wrong_stride", "invalid_index"}


@assay.case(T=[5], D=[8])
def features(make, T, D):
    return {"x": make.normal(T, D), "turn": make.uniform(T, D // 2)}


def test_pairs_of_features_are_taken_from_halves():
    def turned(a, b, turn):
        return a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()

    def golden(x, turn):
        return torch.stack(turned(x[:, 0::2], x[:, 1::2], turn), -1).flatten(1)

    def kernel(x, turn):
        return torch.cat(turned(*x.chunk(2, 1), turn), 1)

    change = best(assay.Target(kernel, golden, cases=features, backward=None))
    assert (change.cause, change.exact) == ("permuted", True) and "axis 1 of x" in change.text


@assay.case(T=[7], G=[3], E=[12])
def groups(make, T, G, E):
    return {"x": make.normal(T, E), "open": make.normal(T, G)}


def test_grouped_masks_taken_in_turn_and_wrong_fill_values():
    def golden(x, open):
        return x.masked_fill((open < 0).repeat_interleave(4, 1), -torch.inf)

    def kernel(x, open):
        return x.masked_fill((open < 0).repeat(1, 4), -torch.inf)

    change = best(assay.Target(kernel, golden, cases=groups, backward=None))
    assert (change.cause, change.exact) == ("permuted", True) and "h % 3" in change.text
    back = best(assay.Target(golden, kernel, cases=groups, backward=None))
    assert (back.cause, back.exact) == ("permuted", True) and "h // 4" in back.text
    zero = best(assay.Target(lambda x, open: golden(x, open).clamp(min=-99) * (golden(x, open) > -99), golden,
                             cases=groups, backward=None))  # fmt: skip
    assert (zero.cause, zero.exact) == ("wrong_mask", True) and "hold 0 instead of -inf" in zero.text


# reads from before an update


@assay.case(T=[6], D=[4])
def states(make, T, D):
    return {"fade": make.uniform(T, D), "x": make.normal(T, D), "s": make.normal(D)}


def solved(L, b, short=0):
    rows = []
    for i in range(len(b)):
        known = sum((L[i, j] * rows[j] for j in range(i - short)), torch.zeros_like(b[i]))
        rows.append((b[i] - known) / L[i, i])
    return torch.stack(rows)


# a factor of one addend alone


@assay.case(T=[5], D=[4])
def gated(make, T, D):
    return {
        "x": make.normal(T, D),
        "r": make.normal(T, D),
        "w": make.normal(D, D),
        "b": make.normal(D),
        "h": make.normal(D),
    }
