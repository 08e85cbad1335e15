"""Influence of slices: a few runs test many slices at once, and the others get a run of their own."""

import ast
import math
from pathlib import Path

import pytest
import torch

from assay.kernels import autograd, plain_sum, probes_of, rows, sum_gradients, target, texts, weighted_sum
from goldsmith import assay
from goldsmith.assay.probes import taint, taint_screen
from goldsmith.assay.probes.slices import far

BESIDE = 2  # runs with large numbers next to the inputs, which test no slice


def tainted(kernel, golden=weighted_sum, cases=rows, **more):
    return assay.check(target(kernel, golden, cases, **more), probes="taint", raises=False)


def taint_findings(kernel, golden=weighted_sum, cases=rows, monkeypatch=None, **more):
    """The findings of the taint probe alone: `values` is silenced, since it would report these tensors first."""
    monkeypatch.setattr("goldsmith.assay.probes.values.judge", lambda *a, **k: set())
    return texts(tainted(kernel, golden, cases, **more), "taint")


def slice_texts(kernel, cases=rows, golden=weighted_sum):
    seen = []
    kept = taint_screen.remaining

    def spy(examination, slices):
        seen.append((slices, kept(examination, slices)))
        return seen[-1][1]

    taint_screen.remaining = spy
    try:
        report = tainted(kernel, golden, cases)
    finally:
        taint_screen.remaining = kept
    ((all_of_them, left),) = seen
    return report, [s.text for s in all_of_them], [s.text for s in left]


def test_first_last_and_a_random_slice_of_every_axis_are_tried_each_once():
    _, slices, _ = slice_texts(plain_sum)
    assert [t for t in slices if t.startswith("x[axis T")][:2] == ["x[axis T = 0]", "x[axis T = 11]"]
    assert len(slices) == 9  # three of x's T, of its D, and of w's only axis

    @assay.case(T=[1], D=[1])
    def single(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    _, slices, _ = slice_texts(plain_sum, single)
    assert len(slices) == 4  # the only element of each, with NaN and with a number


def test_a_right_kernel_is_cleared_in_fewer_runs_than_there_are_slices():
    report, slices, left = slice_texts(plain_sum)
    runs = next(p.runs for p in report.probes if p.name == "taint")
    assert report.ok and not left and runs - BESIDE < len(slices)


def cut(x, w):
    return (x * w)[:, :-1].sum(-1)


def wide_grid(x, w):
    return torch.cat([plain_sum(x, w)[:-1], torch.full((1,), 1.5)])


def test_a_slice_without_influence_is_named(monkeypatch):
    lines = taint_findings(cut, backward=None, monkeypatch=monkeypatch)
    share = "every element; 12 of 12 elements (100 %)"
    text = (
        f"x[axis D = 39] has no influence on y ({share}), in the golden it has: a reduction cut short, or a wrong mask"
    )
    assert text in lines


def test_a_row_that_is_never_read_is_named_with_the_affected_elements(monkeypatch):
    lines = taint_findings(wide_grid, backward=None, monkeypatch=monkeypatch)
    assert any(t.startswith("x[axis T = 11] has no influence on y (axis T: 11 (to the end); 1 of 12") for t in lines)


def test_a_cut_gradient_is_named_where_the_forward_is_right(monkeypatch):
    def backward(x, w, g):
        dx, _ = sum_gradients(x, w, g)
        return dx, (g[:-1, None] * x[:-1]).sum(0)

    lines = taint_findings(autograd(plain_sum, backward), monkeypatch=monkeypatch)
    assert any("x[axis T = 11] has no influence on w.grad" in t for t in lines), lines


def leak(x, w):
    """Every row adds the first element of the next row if it exceeds 50."""
    return plain_sum(x, w) + torch.clamp(torch.cat([x[1:, 0], x[-1:, 0]]) - 50, min=0)


def test_a_leak_shows_as_nan_in_other_rows():
    report = tainted(leak, backward=None)
    share = "axis T: 10; 1 of 12 elements (8.33 %)"
    text = f"NaN in x[axis T = 11] reaches y ({share}), in the golden it does not: a wrong mask, or a stray read"
    assert text in texts(report) and probes_of(report) == {"taint"}


def test_a_large_number_shows_a_leak_through_a_maximum_that_swallows_nan():
    """The maximum also looks at the row above, and drops NaN, as Triton's does."""

    def golden(x, w):
        top = (x * w).amax(-1, keepdim=True)
        return torch.exp(x * w - top).sum(-1) + 0 * top.squeeze(-1)

    def kernel(x, w):
        z = x * w
        wider = torch.cat([z, z.roll(1, 0)], 1)
        top = torch.nan_to_num(wider, nan=-math.inf).amax(-1, keepdim=True)
        own = z.amax(-1, keepdim=True)
        return torch.exp(z - top).sum(-1) * torch.exp(top - own).squeeze(-1)

    report = tainted(kernel, golden, backward=None)
    assert not report.ok and any("a large number in x[axis T = " in t for t in texts(report, "taint")), texts(report)


def test_nan_that_a_right_maximum_swallows_is_no_finding():
    def golden(x, w):
        return (x * w).amax(-1)

    def kernel(x, w):
        return torch.nan_to_num(x * w, nan=-math.inf).amax(-1)

    assert tainted(kernel, golden, backward=None).ok


def test_a_slice_that_saturation_hides_from_the_screen_is_run_alone():
    def gate(x, w):
        return torch.sigmoid(100 * (x * w)).sum(-1)

    def kernel(x, w):
        return torch.sigmoid(100 * (x.flip(-1) * w.flip(-1))).sum(-1)

    report, _, left = slice_texts(kernel, golden=gate)
    assert report.ok and left


def test_influence_is_judged_where_bounds_are_open():
    """Forty steps of x -> 2 x - tanh(x) leave the bound open, so legal orders measure the noise."""

    def open_bound(x, w):
        h = x * w * 1e-3
        for _ in range(40):
            h = h / (h.sum(-1, keepdim=True) + 3)
            h = h * 3
        return h

    def stale(x, w):
        return torch.cat([open_bound(x, w)[:-1], torch.full_like(x[-1:], 1e-3)])

    assert tainted(open_bound, open_bound, backward=None).ok
    report = tainted(stale, open_bound, backward=None)
    assert not report.ok


def test_a_result_that_is_the_same_after_one_number_by_chance_is_not_without_influence(monkeypatch):
    """A rounded result may come out as before; other numbers show that the element is read."""

    first = []

    def kernel(x, w):
        first.append(x.clone())
        large = x.abs() >= far(first[0]) / 2
        return plain_sum(torch.where(large, first[0], x), w)

    monkeypatch.setattr(taint_screen, "remaining", lambda examination, slices: [s for s in slices if s.random])
    lines = taint_findings(kernel, backward=None, monkeypatch=monkeypatch)
    assert not any("has no influence" in t for t in lines), lines


@pytest.mark.parametrize("kernel", [lambda x, w: plain_sum(x.flip(-1), w.flip(-1)), plain_sum])
def test_with_decisions_every_slice_is_run_alone(kernel):
    @assay.case(T=[8], E=[6])
    def scored(make, T, E):
        return {"scores": make.normal(T, E), "k": 2}

    def route(scores, k):
        index = assay.stage("index", scores.topk(k, -1).indices)
        return {"weight": scores.gather(-1, index), "index": index}

    one = assay.Target(route, route, cases=scored, decisions={"index": assay.topk(scores="scores", k="k")})
    report = assay.check(one, probes="taint")
    assert report.ok and next(p.runs for p in report.probes if p.name == "taint") == 6 + BESIDE


def test_a_kernel_that_refuses_nan_is_not_accused():
    def kernel(x, w):
        if not bool(torch.isfinite(x).all() and torch.isfinite(w).all()):
            raise ValueError("inputs must be finite")
        return plain_sum(x, w)

    assert assay.check(target(kernel)).ok


@pytest.mark.parametrize("sign", [1, -1], ids=["a_maximum", "a_minimum"])
@pytest.mark.parametrize("away", ["past", "before"])
def test_a_stray_read_that_a_comparison_swallows_is_found(sign, away):
    """One element next to the input; a comparison with `>` drops its NaN."""

    def kernel(x, w):
        at = x.storage_offset() + (x.numel() if away == "past" else -1)
        stray = x.as_strided((), (), at)
        best = (sign * x * w).amax(-1)
        return sign * torch.where(sign * stray > best, sign * stray, best)

    def golden(x, w):
        return sign * (sign * x * w).amax(-1)

    (text,) = texts(tainted(kernel, golden, backward=None))
    assert text.startswith("memory next to the inputs reaches y (every element")
    assert tainted(golden, golden, backward=None).ok


@assay.case(T=[6], N=[4])
def decaying(make, T, N):
    return {"x": make.normal(T, N), "a": make.uniform(T, N)}


def scan(x, a):
    """h[t] = exp(-a[t]) h[t-1] + x[t]; exp may overflow at the first step, where it meets 0."""
    h, rows = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = torch.exp(-a[t]) * h + x[t]
        rows.append(h)
    return torch.stack(rows)


def test_an_exponential_that_overflows_in_float32_alone_is_no_leak():
    report = assay.check(assay.Target(scan, scan, cases=decaying, name="scan"), raises=False)
    assert report.verdict == "pass", str(report)


# NaN by products with a mask's zeros


def padded_attention(masked: bool):
    """Attention whose last three keys are padding; its backward takes exp(-inf - logsumexp) for them, as is usual."""

    def scores(q, k):
        bar = torch.arange(k.shape[-2], device=k.device) >= k.shape[-2] - 3
        return (q @ k.mT).masked_fill(bar, -torch.inf)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            s = scores(q, k)
            lse = s.logsumexp(-1, keepdim=True)
            y = (s - lse).exp() @ v
            ctx.save_for_backward(q, k, v, y, lse)
            return y

        @staticmethod
        def backward(ctx, dy):
            q, k, v, y, lse = ctx.saved_tensors
            p = ((scores(q, k) if masked else q @ k.mT) - lse).exp()
            ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
            return ds @ k, ds.mT @ q, p.mT @ dy

    def draw(make, T=9, D=5):
        return {"q": make.normal(2, T, D), "k": make.normal(2, T, D), "v": make.normal(2, T, 4)}

    def golden(q, k, v):
        return scores(q, k).softmax(-1) @ v

    return assay.Target(Attention.apply, golden, cases=[assay.Case("padded", draw, {})], name="padded attention")


def test_nan_that_a_mask_of_zeros_spreads_is_a_note(seed):
    """NaN reaches the gradients of padded keys, which no number reaches; in the golden it spreads to others."""
    report = assay.check(padded_attention(True), seed=seed, device="cpu")
    assert {n.id for n in report.notes} == {"nan_spread"} and "k.grad" in report.notes[0].text


def test_numbers_that_pass_a_mask_are_a_wrong_mask(seed, monkeypatch):
    monkeypatch.setattr("goldsmith.assay.probes.values.judge", lambda *a, **k: set())  # which would report it at once
    report = assay.check(padded_attention(False), seed=seed, device="cpu", probes="taint", raises=False)
    assert any("reaches k.grad" in line and "a wrong mask" in line for line in texts(report, "taint"))


def test_numbers_beside_an_infinity_are_not_so_large_that_one_rounding_decides():
    def scores(x, e):
        return torch.where(x == -math.inf, 0.0, e)

    def shares(x):
        top = x.amax(-1, keepdim=True).clamp(min=-1e30)
        return scores(x, (x - (top + (x - top).exp().sum(-1, keepdim=True).log())).exp())

    def by_powers_of_two(x):  # a right kernel: the sum of logarithms is rounded once more, in base 2
        x, of_2 = x.float(), 1 / math.log(2)
        top = x.amax(-1, keepdim=True).clamp(min=-1e30)
        total = (top + (x - top).exp().sum(-1, keepdim=True).log()) * (of_2 * (1 + 1e-7))
        return scores(x, torch.addcmul(-total, x, torch.tensor(of_2)).exp2()).bfloat16()

    @assay.case(T=3)
    def masked(make, T):
        x = make.normal(T, 5)
        x[0] = -math.inf
        return {"x": x}

    kernel = assay.Target(by_powers_of_two, shares, cases=masked, dtypes=(torch.bfloat16,), grads=(), outputs=("y",))
    report = assay.check(kernel, probes="taint", raises=False)
    assert report.verdict == "pass", str(report)


def test_probes_import_one_another_at_module_level():
    """If two probes share code, it is in a third module, so that no import hides in a function to break a cycle."""
    folder = Path(taint.__file__).parent
    hidden = [
        f"{path.name}:{node.lineno}"
        for path in folder.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not hidden
