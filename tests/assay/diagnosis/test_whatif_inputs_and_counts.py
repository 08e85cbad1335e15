"""Changed goldens: boolean flags, lengths, counts, per-part maxima, branches of the backward."""

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.whatif import engine, explain

pytestmark = pytest.mark.sweep(5)


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


def one_later(flags):
    return torch.cat([flags[1:], torch.zeros_like(flags[:1])])


@pytest.mark.parametrize(
    "changed, cause, text",
    [
        ({"flags": one_later}, "shifted", "resets is shifted by -1 along axis 0, filled with zeros"),
        (
            {"flags": lambda f: f.long().view(torch.int32).flatten()[: f.numel()].view(f.shape)},
            "dtype_width",
            "resets is stored in 64 bits per number and read in 32",
        ),
    ],
)
def test_flags_read_at_a_wrong_place(changed, cause, text, monkeypatch):
    monkeypatch.setattr(engine, "_LEAST_SECONDS", 60.0)  # a slow processor stopped before this change was tried
    some = explanations(lambda x, resets, keep: decayed(x, resets, keep, **changed), decayed, marked)
    assert some[0].cause == cause and text in [w.text for w in some if w.exact and w.whole]


def test_a_mask_left_out_of_one_of_two_products():
    cause, text = cause_and_text(
        lambda x, resets, keep: decayed(x, resets, keep, twice=torch.ones_like), decayed, marked
    )
    assert cause == "wrong_mask" and "is left out of" in text and "in 9 places" in text


@assay.case(T=[9], C=[5])
def chosen(make, T, C):
    return {"x": make.normal(T, C), "on": make.uniform(T, C) < 0.5}


def test_boolean_flags_that_are_shifted_or_inverted():
    def golden(x, on):
        return torch.where(on, x, 0.1 * x)

    assert cause_and_text(lambda x, on: golden(x, ~on), golden, chosen) == ("wrong_mask", "on counts as its opposite")
    assert cause_and_text(lambda x, on: golden(x, one_later(on)), golden, chosen)[0] in ("shifted", "mask_shift")


# bits of a byte


@assay.case(R=[6], C=[16])
def packed(make, R, C):
    return {"x": make.normal(R, C), "codes": make.integers(0, 256, R, C // 4).to(torch.uint8)}


@pytest.mark.parametrize("width, what", [(2, "pairs of bits"), (1, "bits")])
def test_parts_of_a_byte_read_in_reverse(width, what):
    def golden(x, codes, down=False):
        at = torch.arange(0, 8, width)[: x.shape[1] // codes.shape[1]]
        at = 8 - width - at if down else at
        return x * ((codes.long()[..., None] >> at) & ((1 << width) - 1)).flatten(1).to(x.dtype)

    cause, text = cause_and_text(lambda x, codes: golden(x, codes, True), golden, packed)
    assert (cause, text) == ("wrong_format", f"the {what} of every byte of codes are read from the other end")


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


def test_a_count_that_is_the_whole_length():
    cause, text = cause_and_text(lambda x, lengths: pooled(x, lengths, by=lambda x, count: x.shape[1]), pooled, rows)
    assert cause == "wrong_factor" and "is divided by 7, not by each group's" in text


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


@pytest.mark.parametrize("first, cause", [(1, "off_by_one"), (0, "shifted")])
def test_positions_counted_one_too_early(first, cause):
    def golden(x, late=0):
        return x.sort(-1).values * torch.arange(first - late, x.shape[1] + first - late)

    assert cause_and_text(lambda x: golden(x, 1), golden, ranked) == (cause, "arange() begins one too early")


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


@assay.case(N=[6], V=[150], R=[4])
def parted(make, N, V, R):
    ids = make.integers(0, V, N)
    ids[0], ids[2], ids[5] = V - 1, V - 2, 130
    return {"x": make.normal(N, V, std=2.0), "table": make.normal(V, 8), "ids": ids, "R": R}


def test_parts_that_each_use_their_own_maximum():
    def golden(x, table, ids, R):
        return torch.softmax(x, 1) @ table

    def own(x, table, ids, R):
        parts = x.split(-(-x.shape[1] // R), 1)
        e = torch.cat([torch.exp(p - p.amax(1, keepdim=True)) for p in parts], 1)
        return e / e.sum(1, keepdim=True) @ table

    cause, text = cause_and_text(own, golden, parted)
    assert cause == "missing_rescale" and "in 4 parts of" in text


def looked_up(x, table, ids, R):
    return table[ids] * x.sum(1, keepdim=True)


def test_rows_that_no_part_covers():
    def own(x, table, ids, R):
        each = len(table) // R
        return torch.where((ids < R * each)[:, None], looked_up(x, table, ids, R), 0.0)

    cause, text = cause_and_text(own, looked_up, parted)
    assert cause == "missing_partition" and "reads nothing from index 148 on" in text


def test_indices_that_become_negative_in_eight_bits():
    def own(x, table, ids, R):
        return torch.where((ids.to(torch.int8) >= 0)[:, None], looked_up(x, table, ids, R), 0.0)

    cause, text = cause_and_text(own, looked_up, parted)
    assert cause == "index_overflow" and "8 bits" in text


# backwards: another branch of a choice, undivided exponentials


class Mine(torch.autograd.Function):
    """golden(x, w) with the gradient of x replaced by `slope(x, w)` times the output's gradient."""

    @staticmethod
    def forward(ctx, x, w, golden, slope):
        ctx.save_for_backward(x, w)
        ctx.slope = slope
        return golden(x, w)

    @staticmethod
    def backward(ctx, g):
        return ctx.slope(g, *ctx.saved_tensors), None, None, None


@assay.case(N=[40], D=[5])
def pairs(make, N, D):
    return {"x": make.normal(N, D), "w": make.normal(N, D)}


def test_a_backward_that_always_takes_one_side_of_a_maximum():
    def golden(x, w):
        return torch.maximum(x * w, 2 * x.clamp(-0.5, 0.5))

    def slope(g, x, w):
        return g * torch.where(x.abs() < 0.5, 2.0, 0.0)

    def own(x, w):
        return Mine.apply(x, w, golden, slope)

    cause, text = cause_and_text(own, golden, pairs, "x.grad", grads=("x",))
    assert cause == "wrong_decision" and "always takes clamp(x) * 2" in text


def test_a_backward_whose_shares_are_not_divided_by_their_sum():
    def golden(x, w):
        return torch.logsumexp(x, 1) + w.sum(1)

    def slope(g, x, w):
        return g[:, None] * torch.exp(x - x.amax(1, keepdim=True))

    cause, text = cause_and_text(lambda x, w: Mine.apply(x, w, golden, slope), golden, pairs, "x.grad", grads=("x",))
    assert cause == "wrong_factor" and "are not divided by their sum" in text


# only NaN


@pytest.mark.parametrize("guarded", [lambda s, n: s / n.clamp(min=1), lambda s, n: torch.where(n > 0, s / n, 0.0)])
def test_an_empty_mean_that_makes_the_only_number_nan(guarded):
    @assay.case(B=[4], T=[7], D=[3])
    def some(make, B, T, D):
        inputs = rows[0].draw(make, B, T, D)
        inputs["lengths"][2] = 0
        return inputs

    def mean(x, lengths, divided):
        own = torch.arange(x.shape[1]) < lengths[:, None]
        return divided(torch.where(own[..., None], x, 0.0).sum((1, 2)), lengths.to(x.dtype)).sum()

    cause, _ = cause_and_text(
        lambda x, lengths: mean(x, lengths, lambda s, n: s / n), lambda x, lengths: mean(x, lengths, guarded), some
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
