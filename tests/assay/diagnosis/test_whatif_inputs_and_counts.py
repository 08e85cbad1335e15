"""Changed goldens: boolean flags, lengths, counts, per-part maxima, branches of the backward."""

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


def explanations(candidate, golden, case, tensor="y", **declared):
    examination = session_of(assay.Target(candidate, golden, cases=case, **declared), ("values", "ensemble"))
    return explain(
        examination, tensor, dict(examination.first.outputs, **examination.first.grads)[tensor], examination.first
    )


def cause_and_text(candidate, golden, case, tensor="y", **declared):
    some = explanations(candidate, golden, case, tensor, **declared)
    assert some and some[0].exact, [w.text for w in some] or "nothing explains it"
    return some[0].cause, some[0].text


# a decaying sum that a flag resets


@assay.case(T=[9], C=[5])
def marked(make, T, C):
    resets = (make.uniform(T, C) < 0.3).to(torch.int32)
    resets[3, 0], resets[5, 1], resets[T - 1, 2] = 1, 1, 1
    return {"x": make.normal(T, C), "resets": resets, "keep": 0.7}


def decayed(x, resets, keep, *, flags=lambda f: f, twice=lambda live: live):
    live = 1.0 - flags(resets).to(x.dtype)
    state, out = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        state = x[t] + keep * live[t] * state - keep * twice(live[t]) * x[t - 1]
        out.append(state)
    return torch.stack(out)


def test_a_mask_left_out_of_one_of_two_products():
    cause, text = cause_and_text(
        lambda x, resets, keep: decayed(x, resets, keep, twice=torch.ones_like), decayed, marked
    )
    assert cause == "wrong_mask" and "is left out of" in text and "in 9 places" in text


@assay.case(T=[9], C=[5])
def chosen(make, T, C):
    return {"x": make.normal(T, C), "on": make.uniform(T, C) < 0.5}


# bits of a byte


@assay.case(R=[6], C=[16])
def packed(make, R, C):
    return {"x": make.normal(R, C), "codes": make.integers(0, 256, R, C // 4).to(torch.uint8)}


# lengths, counts, places


@assay.case(B=[4], T=[7], D=[3])
def rows(make, B, T, D):
    lengths = make.integers(2, T, B)
    lengths[0], lengths[1] = 2, 5
    return {"x": make.normal(B, T, D), "lengths": lengths}


def pooled(x, lengths, *, by=None, take=None):
    own = torch.arange(x.shape[1]) < (lengths if take is None else take(x, lengths))[:, None]
    count = own.sum(1, keepdim=True)
    return torch.where(own[..., None], x, 0.0).sum(1) / (count if by is None else by(x, count))


def test_lengths_that_count_as_full():
    def full(x, lengths):
        return torch.full_like(lengths, x.shape[1])

    cause, text = cause_and_text(lambda x, lengths: pooled(x, lengths, take=full), pooled, rows)
    assert cause == "wrong_mask"
    assert explanations(lambda x, lengths: pooled(x, lengths), pooled, rows) == [], "the right kernel"


@assay.case(N=[12], G=[6])
def gridded(make, N, G):
    return {"x": make.uniform(N), "table": make.normal(G)}


def test_a_grid_step_with_one_interval_too_few():
    def golden(x, table, steps=None):
        at = x * (1.0 / (0.25 / (steps or len(table))))
        return torch.where(at < 7.0, torch.sin(at), 0.0) * table.sum()

    cause, text = cause_and_text(lambda x, table: golden(x, table, len(table) - 1), golden, gridded)
    assert cause == "wrong_factor" and "G" in text


@assay.case(N=[8], D=[10])
def ranked(make, N, D):
    return {"x": make.normal(N, D)}


# outer products


@assay.case(T=[6], D=[4])
def keyed(make, T, D):
    return {"k": make.normal(T, D), "v": make.normal(T, D), "q": make.normal(T, D)}


def test_an_outer_product_in_the_other_order():
    def golden(k, v, q, swap=False):
        state, out = k.new_zeros(k.shape[1], k.shape[1]), []
        for t in range(len(k)):
            a, b = (v[t], k[t]) if swap else (k[t], v[t])
            state = 0.9 * state + a[:, None] * b
            out.append(q[t] @ state + v[t])
        return torch.stack(out)

    cause, text = cause_and_text(lambda k, v, q: golden(k, v, q, True), golden, keyed)
    assert cause == "transposed" and "in 6 places" in text


# parts: their own maximum, uncovered remainders, 8-bit indices


def looked_up(x, table, ids, R):
    return table[ids] * x.sum(1, keepdim=True)


# backwards: another branch of a choice, undivided exponentials


@assay.case(N=[40], D=[5])
def pairs(make, N, D):
    return {"x": make.normal(N, D), "w": make.normal(N, D)}


# only NaN


def test_an_empty_mean_that_makes_the_only_number_nan():
    @assay.case(B=[4], T=[7], D=[3])
    def some(make, B, T, D):
        inputs = rows[0].draw(make, B, T, D)
        inputs["lengths"][2] = 0
        return inputs

    def mean(x, lengths, divided):
        own = torch.arange(x.shape[1]) < lengths[:, None]
        return divided(torch.where(own[..., None], x, 0.0).sum((1, 2)), lengths.to(x.dtype)).sum()

    cause, _ = cause_and_text(
        lambda x, lengths: mean(x, lengths, lambda s, n: s / n),
        lambda x, lengths: mean(x, lengths, lambda s, n: s / n.clamp(min=1)),
        some,
    )
    assert cause == "empty_group"


# a draw of another shape is no witness


def test_a_change_of_one_block_holds_where_draws_differ_in_length():
    @assay.case(E=[16], D=[6])
    def edges(make, E, D):
        n = E - int(make.integers(0, 5, 1))
        return {"a": make.normal(n, D), "b": make.normal(n, 3)}

    def golden(a, b):
        return a.mT @ b

    def last_tile(a, b):
        first = (len(a) - 1) // 4 * 4
        return a[first:].mT @ b[first:]

    assert cause_and_text(last_tile, golden, edges)[0] in ("overwritten_accumulator", "lost_update")
