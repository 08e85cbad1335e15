"""Changed goldens: loops in chunks, padded lanes, other axes, integers that wrap, rows in sorted order."""

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

BLOCK = 4


def best(target, tensor="y"):
    examination = session_of(target, ("values", "ensemble"))
    got = dict(examination.first.outputs, **examination.first.grads)[tensor]
    changes = explain(examination, tensor, got, examination.first)
    assert changes, f"nothing explains {tensor}"
    return changes[0]


@assay.case(T=[10], D=[3])
def steps(make, T, D):
    return {"x": make.normal(T, D), "a": make.uniform(T, D)}


def scan(x, a, *, border=lambda a, h, x: a * h + x):
    h, out = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = border(a[t], h, x[t]) if t and t % BLOCK == 0 else a[t] * h + x[t]
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize(
    "cause, border",
    [
        ("wrong_factor", lambda a, h, x: h + x),
        ("missing_term", lambda a, h, x: x + 0 * h),
        ("sign_flip", lambda a, h, x: x - a * h),
    ],
)
def test_a_wrong_carry_at_a_chunk_border(cause, border):
    change = best(assay.Target(lambda x, a: scan(x, a, border=border), lambda x, a: scan(x, a), cases=steps))
    assert (change.cause, change.exact, change.whole) == (cause, True, True)
    assert f"at every {BLOCK}th of 10 steps, where a chunk begins" in change.text or "in 2 places" in change.text


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        y = scan(x, a)
        ctx.save_for_backward(x, a, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, a, y = ctx.saved_tensors
        dh, dx, da = torch.zeros_like(dy[0]), [], []
        for t in reversed(range(len(x))):
            dh = dh + dy[t]
            dx.append(dh)
            da.append(dh * y[t - 1] if t else torch.zeros_like(dh))
            dh = dh * a[t] if t % BLOCK else torch.zeros_like(dh)
        return torch.stack(dx[::-1]), torch.stack(da[::-1])


def test_a_backward_that_drops_its_carry_at_a_chunk_border():
    change = best(assay.Target(Scan.apply, lambda x, a: scan(x, a), cases=steps), "x.grad")
    assert (change.cause, change.exact) == ("missing_term", True)


@assay.case(T=[7], D=[13])
def rows(make, T, D):
    return {"x": make.normal(T, D) + 1}


def centred(x, width=None):
    """The variance of a row; with `width`, of a row padded with zeros before its mean is subtracted."""
    n = x.shape[-1]
    c = x - x.mean(-1, keepdim=True)
    wide = torch.nn.functional.pad(x, (0, (width or n) - n)) - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c if width is None else wide).square().sum(-1, keepdim=True) / n + 1e-5)


@pytest.mark.parametrize(
    "candidate, golden",
    [
        (lambda x: x / x.abs().amax(), lambda x: x / x.abs().amax(-1, keepdim=True)),
        (lambda x: x / x.square().sum(-1, keepdim=True), lambda x: x / x.square().sum((0, 1), keepdim=True)),
        (lambda x: x / x.norm(dim=-1, keepdim=True), lambda x: x / x.norm()),
    ],
)
def test_a_reduction_over_more_or_fewer_axes(candidate, golden):
    change = best(assay.Target(candidate, golden, cases=rows))
    assert (change.cause, change.exact) == ("wrong_axis", True), change


@assay.case(T=[300], D=[2])
def places(make, T, D):
    return {"x": make.normal(T, D), "at": torch.arange(T)}


def test_integers_that_wrap():
    def turned(x, at):
        return x * torch.cos(at.to(x.dtype) / 50)[:, None]

    change = best(assay.Target(lambda x, at: turned(x, at.to(torch.uint8)), turned, cases=places))
    assert (change.cause, change.exact) == ("index_overflow", True)


@assay.case(T=[9], E=[3], D=[4])
def pairs(make, T, E, D):
    return {"x": make.normal(T, D), "w": make.uniform(T), "e": make.integers(0, E, T), "m": make.normal(E, D)}


def test_rows_left_in_sorted_order():
    def golden(x, w, e, m):
        return x * m[e] * w[:, None]

    def kernel(x, w, e, m):
        order = e.argsort(stable=True)
        return torch.empty_like(x).index_copy(0, order, x[order] * m[e[order]] * w[:, None])

    change = best(assay.Target(kernel, golden, cases=pairs))
    assert (change.cause, change.exact, change.params["operand"]) == ("permuted", True, "w")


def test_off_by_one_comparisons_of_positions_and_of_borders():
    def causal(x, late=0):
        at = torch.arange(len(x))
        return (at[:, None] - late <= at[None]).to(x.dtype) @ x

    def grouped(x, late=0):
        ends, at = torch.tensor([2, 3, 7]), torch.arange(len(x))
        return (at[None] < ends[:, None] + late).to(x.dtype) @ x

    assert best(assay.Target(lambda x: grouped(x, 1), grouped, cases=rows)).cause == "off_by_one"
    assert best(assay.Target(lambda x: causal(x, 1), causal, cases=rows)).cause == "mask_shift"
