"""Inputs of other magnitudes: powers of two, equal values, an offset, NaN and Inf."""

from types import SimpleNamespace

import pytest
import torch

from assay.kernels import normed, plain_sum, probes_of, rmsnorm, target, texts
from goldsmith import assay
from goldsmith.assay.noise import ensemble
from goldsmith.assay.probes import scaling


def scaled(kernel, golden, cases=normed, **more):
    probes = more.pop("probes", "scaling")
    return assay.check(target(kernel, golden, cases, **more), probes=probes, raises=False)


def softmax(x, w, eps):
    return torch.softmax(x, -1)


def where(report):
    return {r.run for r in report.rows if r.state == "bad"}


def test_an_absolute_epsilon_shows_at_small_scale_only():
    def golden(x, w, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    def absolute(x, w, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-9)

    report = scaled(absolute, golden)
    assert probes_of(report) == {"scaling"} and where(report) == {"scale:2^-12"}


def test_a_constant_below_every_bound_breaks_exact_scaling():
    """1e-14 is below the rounding of a mean square of 1; next to 2^-24 it is a few units in the last place."""

    def golden(x, w, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    def absolute(x, w, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-14)

    report = scaled(absolute, golden, backward=None)
    assert [f.rung for f in report.findings] == ["SYSTEMATIC"] and "(scale:2^-12)" in report.findings[0].text
    assert scaled(golden, golden).ok


def test_an_output_that_underflows_may_be_read_back_as_it_is_stored():
    """2^-12 makes float16 values subnormal: a sum over what is stored loses bits that the sum before it keeps."""

    @assay.case(T=[3], D=[8])
    def eighths(make, T, D):
        return {"x": (make.normal(T, D) * 8).round() / 8 + 4, "w": (make.normal(D) * 8).round() / 8 + 4}

    def golden(x, w):
        y = x * w
        return y, y.sum(-1)

    def read_back(x, w):
        y = x * w
        return y, y.float().sum(-1)

    kernel = target(read_back, golden, eighths, outputs=("y", "total"), dtypes=(torch.float16,), backward=None)
    assert assay.check(kernel, probes="scaling", raises=False).ok


def test_exact_scaling_is_not_asked_of_kernels_that_never_repeat():
    generator = torch.Generator().manual_seed(0)

    def any_order(x, w):
        p = torch.randperm(x.shape[1], generator=generator)
        y = torch.zeros(len(x))
        for d in p.tolist():
            y = y + x[:, d] * w[d]
        return y

    assert assay.check(target(any_order), probes="scaling").ok


def test_a_softmax_without_its_maximum_overflows_at_large_scale():
    report = scaled(lambda x, w, eps: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), softmax)
    assert any(t.startswith("y has NaN where the golden is a number") for t in texts(report))
    assert {"scale:2^12", "values:offset"} & where(report)


@assay.case(T=[13], D=[100, 256, 1000, 4096])
def wide(make, T, D):
    return {"x": make.normal(T, D), "eps": 1e-5}


def layer_norm(x, eps):
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)


def in_one_pass(x, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + eps)


@pytest.mark.parametrize("case", wide, ids=str)
def test_cancellation_in_one_pass_shows_at_an_offset(case):
    """From about 100 terms on, the error is within every order's bound, but far outside the honest noise."""
    report = scaled(in_one_pass, layer_norm, case, probes=("scaling", "ensemble"))
    assert where(report) == {"values:offset"} and probes_of(report) == {"scaling"}
    assert {f.tensor for f in report.findings} == {"y", "x.grad"}
    assert any(f.rung == "CERTAIN" for f in report.findings) == (case.sizes["D"] == 100)


@pytest.mark.parametrize("case", wide, ids=str)
def test_two_passes_are_left_alone_at_an_offset(case):
    assert scaled(layer_norm, layer_norm, case, probes=("scaling", "ensemble")).ok


def test_no_finding_where_other_honest_runs_stand_out_as_well(monkeypatch):
    """Seen on an H100: with logits of 10^7 a ninth honest Sinkhorn may lie outside the range of the other eight."""
    legal, requests = ensemble.legal_runs, []

    def one_far_off(*args, seed, **options):
        runs = legal(*args, seed=seed, **options)
        requests.append(seed)
        if seed == 7:  # the second ensemble: one member is as far off as in_one_pass
            runs[0] = {name: t + 0.01 for name, t in runs[0].items()}
        return runs

    monkeypatch.setattr(ensemble, "legal_runs", one_far_off)
    report = scaled(in_one_pass, layer_norm, wide[1], probes=("scaling", "ensemble"))
    assert report.ok and 7 in requests
    notes = [n.text for n in report.notes if n.id == "compute_range"]
    assert any("other honest runs stand out of the noise, too at values:offset" in text for text in notes)


def test_swallowed_nan_and_inf_are_certain_where_they_matter():
    report = scaled(lambda x, w, eps: torch.nan_to_num(rmsnorm(x, w, eps)), rmsnorm)
    assert texts(report)[0].startswith("values:nan is swallowed: y is finite where the golden is not: ")

    def relu(x, w, eps):  # the golden itself drops NaN where it does not matter
        return torch.where(x > 0, x, 0.0)

    assert scaled(relu, relu).ok


def test_nan_that_is_swallowed_at_one_element_alone_has_one_verdict_for_every_seed():
    def swallows(x):
        return torch.where(torch.arange(x.shape[-1]) == 3, torch.nan_to_num(x), x) * 2

    case = assay.case(D=[8])(lambda make, D: {"x": make.normal(D)})

    def reports(**declared):
        target = assay.Target(swallows, lambda x: x * 2, cases=case, backward=None, **declared)
        return [assay.check(target, raises=False, probes="scaling", seed=s) for s in range(12)]

    assert len({r.verdict for r in reports()}) == 1
    assert all(r.ok for r in reports(finite=("x",)))


def test_inputs_that_are_declared_finite_never_hold_nan():
    report = scaled(lambda x, w, eps: torch.nan_to_num(rmsnorm(x, w, eps)), rmsnorm)
    assert "if inputs are always finite, declare finite=(" in texts(report)[0]
    with pytest.raises(assay.TargetError, match="finite: 'y' is not among"):
        assay.Target(rmsnorm, rmsnorm, cases={"x": torch.ones(2, 4), "w": torch.ones(4), "eps": 1e-6}, finite=("y",))


def test_a_gradient_stored_transposed_is_judged_like_any_other():
    inputs = {"k": torch.randn(5, 4)}
    examination = SimpleNamespace(material=SimpleNamespace(inputs=inputs), target=SimpleNamespace(finite=()), notes=[])
    examination.note = lambda *arguments: examination.notes.append(arguments)
    (place,) = scaling._changed_elements(examination).values()
    mask = torch.zeros(4, 5, dtype=torch.bool).mT
    mask[place // 4, place % 4] = True
    assert not scaling._without_planted(examination, "values:nan", "k.grad", mask).any() and len(examination.notes) == 1
    mask[(place + 4) // 4 % 5, place % 4] = True
    assert scaling._without_planted(examination, "values:nan", "k.grad", mask).sum() == 1


def test_zero_times_inf_at_a_masked_element_is_an_accident_of_the_goldens_formula():
    """Attention that skips masked keys is finite where 0 * Inf makes the golden NaN."""

    def mask(x):
        return torch.ones(len(x), len(x), dtype=torch.bool).tril()

    def golden(x, w):
        p = torch.softmax((x @ x.T).masked_fill(~mask(x), -torch.inf), -1)
        return p @ (x * w)

    def skips(x, w):
        rows = [torch.softmax(x[i] @ x[: i + 1].T, -1) @ (x[: i + 1] * w) for i in range(len(x))]
        return torch.stack(rows)

    one = target(skips, golden, backward=None)
    for seed in range(4):
        assay.check(one, probes="scaling", seed=seed)


def test_nan_where_the_golden_is_finite_is_certain_if_numbers_reach_it_too():
    def with_all(x, w, eps):
        return rmsnorm(x, w, eps) + torch.clamp(x.amax() - 500 * x.abs().mean(), min=0)

    def nothing_of_all(x, w, eps):
        return rmsnorm(x, w, eps) + 0 * x.sum()

    start = "values:nan: y is not finite where the golden is: "
    assert any(t.startswith(start) for t in texts(scaled(with_all, rmsnorm), "scaling"))
    report = scaled(nothing_of_all, rmsnorm)
    assert report.ok and {n.id for n in report.notes} == {"nan_spread"}


def test_a_division_by_zero_on_equal_values_is_reported_unless_the_golden_divides_too():
    def golden(x, w, eps):
        d = x - x.mean(-1, keepdim=True)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)

    def no_eps(x, w, eps):
        d = x - x.mean(-1, keepdim=True)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True))

    def golden_without(x, w):
        return no_eps(x, w, 0)

    assert "values:flat" in where(scaled(no_eps, golden))
    assert assay.check(target(golden_without, golden_without), probes="scaling").ok


def test_the_candidate_may_overflow_where_the_golden_does_in_compute_precision():
    def cubed(x, w):
        return ((x * 1e12) ** 3).sum(-1) * 1e-36

    report = assay.check(target(cubed, cubed, backward=None), probes="scaling", raises=False)
    assert report.ok, str(report)


def test_results_after_an_overflowing_store_are_not_judged():
    """y overflows float16 at 2^12, and the kernel continues with the stored value."""

    def golden(x, w, eps):
        y = assay.stage("y0", x * x)
        return y, assay.stage("z", torch.softmax(y, -1))

    def kernel(x, w, eps):
        y = (x.float() * x.float()).to(x.dtype)
        return y, torch.softmax(y.float(), -1).to(x.dtype)

    report = scaled(kernel, golden, dtypes=(torch.float16,), backward=None)
    assert report.ok and "compute_range" in {n.id for n in report.notes}, str(report)


def test_an_overflowing_store_is_no_reason_why_another_result_differs():
    """Of two numbers of some thousands y overflows, so that r is 0; that is no influence of columns that are padded."""

    @assay.case(T=[3], D=[5])
    def weighted(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(T)}

    def golden(x, w):
        y = x * w.unsqueeze(-1)
        return y, torch.rsqrt(y.square().mean(-1) + 1e-6)

    def padded(x, w, beside=None):
        y = (torch.nn.functional.pad(x, (0, 3)).float() * w.float().unsqueeze(-1)).to(x.dtype)
        squares = y.float().square().sum(-1) + (0 if beside is None else beside - 0.5 * beside)
        return y[:, :5].contiguous(), torch.rsqrt(squares / 5 + 1e-6)

    def reading(x, w):
        return padded(x, w, (w.float().abs().roll(1) - 8).clamp(min=0))

    options = {"cases": weighted, "dtypes": (torch.float16,), "outputs": ("y", "r"), "backward": None}
    report = assay.check(assay.Target(padded, golden, **options), probes="scaling", raises=False)
    assert report.ok and "nan_spread" in {n.id for n in report.notes}, str(report)
    report = assay.check(assay.Target(reading, golden, **options), probes="scaling", raises=False)
    assert "nonfinite_leak" in {f.kind for f in report.findings}, str(report)


def test_a_refused_value_is_a_note():
    def kernel(x, w):
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x holds NaN or Inf")
        return plain_sum(x, w)

    report = assay.check(target(kernel), probes="scaling")
    assert {n.text for n in report.notes} == {"values:nan is refused with ValueError"}


def test_large_inputs_stay_within_float16():
    def kernel(x, w, eps):
        return rmsnorm(x.float(), w.float(), eps).to(x.dtype)

    assert assay.check(target(kernel, rmsnorm, normed, dtypes=(torch.float16,)), probes="scaling").ok


@assay.case(T=[6, 17])
def heads(make, T):
    return {name: make.normal(2, T, 8) for name in "qkv"}


def masked(q, k):
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(len(q[0]), len(q[0])).triu(1).bool(), -torch.inf)


class Recomputed(torch.autograd.Function):
    """Attention whose backward recomputes its probabilities, and takes sum(dy * y) for sum(p * dp)."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = masked(q, k)
        lse = torch.logsumexp(s, -1, keepdim=True)
        y = torch.softmax(s, -1) @ v
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        p = torch.exp(masked(q, k) - lse)
        ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ dy


@pytest.mark.parametrize("case", heads, ids=str)
def test_a_backward_that_computes_its_probabilities_again_is_left_alone(case):
    """NaN of a row spreads farther in it than through a mask's zeros, and its sums cancel less at an offset."""
    flash = assay.Target(Recomputed.apply, lambda q, k, v: torch.softmax(masked(q, k), -1) @ v, cases=heads)
    report = assay.check(flash, case, probes=("scaling", "ensemble"), raises=False)
    assert report.ok, texts(report)


def test_a_gradient_that_a_masked_number_reaches_is_no_accident_of_nan():
    class Leaky(Recomputed):
        @staticmethod
        def backward(ctx, dy):
            q, k, v, y, lse = ctx.saved_tensors
            ds = torch.exp(q @ k.mT * q.shape[-1] ** -0.5 - lse) * (dy @ v.mT)
            return ds @ k, ds.mT @ q, ds.mT @ dy

    leaky = assay.Target(Leaky.apply, lambda q, k, v: torch.softmax(masked(q, k), -1) @ v, cases=heads)
    assert not assay.check(leaky, heads[0], probes=("scaling", "ensemble"), raises=False).ok


class StoredLogarithm(torch.autograd.Function):
    """log(sum(exp(x))) whose backward reads the stored result, which is rounded at the size of x."""

    @staticmethod
    def forward(ctx, x, factor):
        y = torch.logsumexp(x, -1)
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        return torch.exp(x - y[:, None]) * dy[:, None] * ctx.factor, None


@assay.case(gap=[2**-9])
def close_maxima(make, gap):
    """Times 2^12 their probabilities are 1 - e^-8 and e^-8, and the stored result is the maximum."""
    return {"x": torch.tensor([[2.0, 2.0 - gap, 1.0, 0.5]])}


def two_passes(x):
    top = x.amax(-1, keepdim=True)
    return (top + torch.log(torch.exp(x - top).sum(-1, keepdim=True)))[:, 0]


@pytest.mark.parametrize("factor, ok", [(1.0, True), (1 + 2**-8, False)])
def test_an_exponential_of_a_difference_may_round_at_the_size_of_its_numbers(factor, ok):
    def candidate(x):
        return StoredLogarithm.apply(x, factor if float(x.abs().max()) > 100 else 1.0)

    report = assay.check(
        assay.Target(candidate, two_passes, cases=close_maxima), probes=("values", "scaling"), raises=False
    )
    assert report.ok == ok, texts(report)
