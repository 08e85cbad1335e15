"""Changed goldens: wrong index arithmetic, rows repeated in turn, another memory layout, neighbouring cells."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(N=[40], S=[37], F=[3])
def corners(make, N, S, F):
    return {"x": make.integers(0, 6, N), "y": make.integers(0, 6, N), "table": make.normal(S, F), "wide": 6}


def looked_up(x, y, table, wide, place):
    return table[place(x, y, wide) % len(table)] * wide + (x * y).unsqueeze(1)


def dense(x, y, wide):
    return x + y * wide


def hashed(x, y, wide):
    return x ^ ((y * 2654435761) & 0xFFFFFFFF)


@pytest.mark.parametrize(
    "right, wrong, cause, text",
    [
        (dense, lambda x, y, wide: x + y * (wide - 1), "wrong_stride", "the stride 6 in"),
        (dense, lambda x, y, wide: x, "invalid_index", "is left out of"),
        (hashed, lambda x, y, wide: x ^ (y.int() * (2654435761 - 2**32)).long(), "index_overflow", "32 bits with a"),
        (lambda x, y, wide: x + (y - 2).clamp(0, 3) * wide, lambda x, y, wide: x + (y - 3).clamp(0, 3) * wide,
         "shifted", "is one too low"),
        (lambda x, y, wide: x + 1 + y * wide, dense, "off_by_one", "1 is left out of"),
    ],
)  # fmt: skip
def test_wrong_arithmetic_in_an_index_is_explained(right, wrong, cause, text):
    change = best(
        lambda x, y, table, wide: looked_up(x, y, table, wide, wrong),
        lambda x, y, table, wide: looked_up(x, y, table, wide, right),
        corners,
    )
    assert change.exact and change.cause == cause and text in change.text, change.text


@assay.case(B=[3], T=[5], D=[4])
def modulated(make, B, T, D):
    return {"x": make.normal(B, T, D), "scale": make.normal(B, D)}


@assay.case(P=[7], H=[2], page=[3], D=[4], T=[6])
def cached(make, P, H, page, D, T):
    return {"rows": make.normal(T, H, D), "cache": make.normal(P, H, page, D), "slots": make.permutation(P * page)[:T]}


def stored(rows, cache, slots):
    page = cache.shape[2]
    return cache.transpose(1, 2).index_put((slots // page, slots % page), rows).transpose(1, 2)


@assay.case(P=[7], D=[3])
def projected(make, P, D):
    return {"a": make.normal(P, D), "z": 1 + make.uniform(P), "turn": make.normal(P, 4)}


def test_an_epsilon_added_to_a_divisor_is_explained():
    def golden(a, z, turn, more=0.0):
        return a / (z.unsqueeze(1) + more) - a.sum(1, keepdim=True) / (z.unsqueeze(1) + more)

    change = best(lambda **inputs: golden(**inputs, more=2e-3), golden, projected)
    assert change.cause == "absolute_eps" and change.params["value"] == pytest.approx(2e-3, rel=1e-3), change.text


@assay.case(T=[6], U=[3])
def lattice(make, T, U):
    return {"stay": make.normal(T, U), "go": make.normal(T, U)}


def summed(stay, go, later=0):
    rows = [stay[0] * 0]
    for t in range(1, len(stay)):
        rows.append(torch.stack([rows[-1][u] + stay[t - 1 + later, u] * go[t, u] for u in range(stay.shape[1])]))
    return torch.stack(rows) + stay


def test_a_step_that_reads_its_destination_cell_is_explained():
    change = best(lambda stay, go: summed(stay, go, later=1), summed, lattice)
    assert change.exact and change.cause == "shifted" and "reads the position after its own" in change.text, change.text


@assay.case(B=[9], T=[5])
def ragged(make, B, T):
    lengths = make.integers(1, T, B)
    lengths[::3] = 0
    return {"x": make.normal(B, T), "lengths": lengths}


@pytest.mark.parametrize("counts, what", [(lambda n: n.clamp(min=1), "one"),
                                          (lambda n: torch.where(n == 0, n.max(), n), "all")])  # fmt: skip
def test_an_empty_sequence_taken_as_nonempty_is_explained(counts, what):
    def golden(x, lengths):
        return torch.where(torch.arange(x.shape[1]) < lengths.unsqueeze(1), x, 0.0).sum(1)

    change = best(lambda x, lengths: golden(x, counts(lengths)), golden, ragged)
    assert change.exact and change.cause == "empty_group" and f"to have {what}" in change.text, change.text


def test_a_lost_minus_infinity_is_explained():
    def golden(x, lengths, none=-torch.inf):
        nothing = torch.full(x.shape[1:], none, dtype=x.dtype)
        nothing[0] = 0.25
        return torch.where(torch.arange(x.shape[1]) <= lengths.unsqueeze(1), x - 0.5, nothing).logsumexp(1)

    change = best(lambda x, lengths: golden(x, lengths, 0.0), golden, ragged)
    assert change.exact and change.cause == "wrong_mask" and "0 stands where full" in change.text, change.text


@assay.case(N=[5], C=[3], H=[4])
def pairs(make, N, C, H):
    return {"z": make.normal(N, N, C), "w": make.normal(C, H), "v": make.normal(C, H)}


@assay.case(R=[6], C=[7])
def attended(make, R, C):
    return {"scores": make.normal(R, C), "v": make.normal(C, 4)}


def weighed(scores, v):
    return torch.softmax(scores, 1) @ v


class SavedTooEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, v, what):
        weights = torch.exp(scores - scores.amax(1, keepdim=True))
        total = weights.sum(1, keepdim=True)
        y = weights @ v / total
        ctx.save_for_backward(weights / total, v, y * total) if what == "y" else ctx.save_for_backward(weights, v, y)
        return y

    @staticmethod
    def backward(ctx, g):
        p, v, acc = ctx.saved_tensors
        return p * (g @ v.mT - (g * acc).sum(1, keepdim=True)), p.mT @ g, None


@pytest.mark.parametrize("what, tensor, text", [("y", "scores.grad", "before their division"),
                                                ("weights", "v.grad", "before it was divided by")])  # fmt: skip
def test_weights_saved_before_their_division_are_explained(what, tensor, text):
    change = best(lambda scores, v: SavedTooEarly.apply(scores, v, what), weighed, attended, tensor, backward="auto")
    assert change.exact and change.cause == "wrong_saved_tensor" and text in change.text, change.text


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.tanh(x) * torch.sigmoid(w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        a, b = torch.tanh(x), torch.sigmoid(w)
        da, db = assay.stage("a.grad", g * a), assay.stage("b.grad", g * b)
        return da * (1 - a * a), db * b * (1 - b)


@assay.case(R=[6], C=[7])
def gated(make, R, C):
    return {"x": make.normal(R, C), "w": make.normal(R, C)}


def test_gradients_exchanged_inside_a_backward_are_explained():
    def golden(x, w):
        return assay.stage("a", torch.tanh(x)) * assay.stage("b", torch.sigmoid(w))

    diagnosis = assay.diagnose(assay.Target(Exchanged.apply, golden, cases=gated))
    assert diagnosis.causes[0].tensor in ("a.grad", "b.grad") and diagnosis.causes[0].id == "swapped_results"
    assert "a.grad holds b.grad" in str(diagnosis) or "b.grad holds a.grad" in str(diagnosis)
