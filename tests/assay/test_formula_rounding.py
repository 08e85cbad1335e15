"""Right kernels by another formula than the golden's, which differ in rounding, NaN or range; and wrong kernels."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels import target, texts
from goldsmith import assay

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SEEDS = pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.sweep(2, part=n)) for n in range(2)])


def check(kernel, golden, cases, dtype=torch.float32, seed=0, **more):
    return assay.check(target(kernel, golden, cases, dtypes=(dtype,), **more), seed=seed, raises=False)


def notes(report):
    return {n.id for n in report.notes}


# decays as exponentials of differences of a cumulative sum


@assay.case(N=[7], D=[3], E=[2])
def tokens(make, N, D, E):
    return {"x": make.normal(N, D), "a": -make.uniform(N), "b": make.normal(N, E), "c": make.normal(N, E)}


def recurrence(x, a, b, c):
    state, rows = torch.zeros(b.shape[1], x.shape[1], dtype=x.dtype), []
    for t in range(len(x)):
        state = torch.exp(a[t]) * state + b[t][:, None] * x[t]
        rows.append(c[t] @ state)
    return torch.stack(rows)


def chunked(x, a, b, c, chunk=4, past=0):
    """Listing 1 of the Mamba-2 paper; `past` is the number of future positions that leak in."""
    dtype = x.dtype
    x, a, b, c = (t.float() for t in (x, a, b, c))
    state, rows = x.new_zeros(b.shape[1], x.shape[1]), []
    for at in range(0, len(x), chunk):
        xs, step, bs, cs = (t[at : at + chunk] for t in (x, a, b, c))
        sums = torch.cumsum(step, 0)
        later = ~torch.ones(len(xs), len(xs), dtype=torch.bool).tril(past)
        decay = torch.exp((sums[:, None] - sums).masked_fill(later, -torch.inf))
        rows.append(((cs @ bs.T) * decay) @ xs + torch.exp(sums)[:, None] * (cs @ state))
        state = torch.exp(sums[-1]) * state + (bs * torch.exp(sums[-1] - sums)[:, None]).T @ xs
    return torch.cat(rows).to(dtype)


@BOTH
@SEEDS
def test_a_cumulative_sum_of_decays_is_right(dtype, seed):
    """a[0] acts on an empty state: its gradient is the difference of two equal sums, and NaN - NaN propagates."""
    report = check(chunked, recurrence, tokens, dtype, seed)
    assert report.ok and "nan_spread" in notes(report), str(report)
    assert dtype == torch.bfloat16 or "cancels" in notes(report)


def test_a_cumulative_sum_that_sees_the_next_position_or_adds_to_a_zero_is_wrong():
    def leaks(x, a, b, c):
        return chunked(x, a, b, c, past=1)

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, a, b, c):
            ctx.save_for_backward(x, a, b, c)
            return recurrence(x, a, b, c)

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                grads = list(torch.autograd.grad(recurrence(*inputs), inputs, g))
            grads[1] = grads[1] + torch.zeros_like(grads[1]).index_fill(0, torch.tensor([0]), 1e-4)
            return tuple(grads)

    assert not check(leaks, recurrence, tokens).ok
    messages = texts(check(Adds.apply, recurrence, tokens), "values")
    assert any("a.grad" in text and "nonzero where only 0 is possible" in text for text in messages)


# masks of zeros and ones


@assay.case(N=[10], V=[7])
def some_ignored(make, N, V):
    t = make.integers(0, V, N)
    t[::4] = -100
    return {"z": make.normal(N, V), "t": t}


def ignoring(z, t):
    kept = (t != -100).to(z.dtype)
    loss = -torch.log_softmax(z, -1).gather(1, t.clamp(min=0)[:, None])[:, 0]
    return (loss * kept).sum() / kept.sum()


@SEEDS
def test_rows_that_are_ignored_by_a_factor_of_zero_are_a_note(seed):
    report = check(ignoring, lambda z, t: F.cross_entropy(z, t), some_ignored, seed=seed)
    assert report.ok and notes(report) == {"nan_spread"}, str(report)


def test_rows_whose_large_numbers_reach_the_result_are_not_ignored():
    def clipped(z, t):
        return ignoring(z, t) + torch.clamp(z[t == -100].amax() - 100, min=0)

    messages = texts(
        assay.check(target(clipped, lambda z, t: F.cross_entropy(z, t), some_ignored), raises=False), "taint"
    )
    assert any("reaches y" in text and "a wrong mask" in text for text in messages), messages


@assay.case(B=[3], N=[6], C=[5])
def masked_rows(make, B, N, C):
    mask = torch.zeros(B, N)
    for row, kept in enumerate((6, 3, 1)):
        mask[row, :kept] = 1
    return {"x": make.normal(B, N, C), "mask": mask.to(make.dtype)}


def masked_mean(x, mask):
    return torch.where(mask[..., None] > 0, x, 0).sum(1) / mask.sum(1, keepdim=True)


def by_product(x, mask, eps=0.0):
    mask = mask.float()
    return ((x.float() * mask[..., None]).sum(1) / (mask.sum(1, keepdim=True) + eps)).to(x.dtype)


@BOTH
@SEEDS
def test_a_float_mask_stays_zeros_and_ones(dtype, seed):
    seen = []

    def kernel(x, mask):
        seen.append(bool(((mask == 0) | (mask == 1)).all()))
        return by_product(x, mask)

    report = check(kernel, masked_mean, masked_rows, dtype, seed, grads=("x",))
    assert report.ok and all(seen), str(report)


@BOTH
@SEEDS
def test_masked_elements_may_be_zeroed_by_a_product(dtype, seed):
    def golden(x, mask):
        return torch.where(mask[..., None] > 0, x, -3.0).square()

    def kernel(x, mask):
        mask = mask[..., None].float()
        return (x.float() * mask + (1 - mask) * -3.0).square().to(x.dtype)

    report = check(kernel, golden, masked_rows, dtype, seed, grads=("x",))
    assert report.ok, str(report)


def test_an_unread_or_truncated_mask_is_found():
    def cut(x, mask):
        return by_product(x[:, :-1], mask[:, :-1])

    def ignores_its_end(x, mask):
        return by_product(x, torch.cat([mask[:, :-1], torch.zeros_like(mask[:, -1:])], 1).clamp(min=0))

    for wrong in (cut, ignores_its_end):
        assert not check(wrong, masked_mean, masked_rows, grads=("x",)).ok


def test_masked_inputs_are_still_scaled():
    def golden(x, mask):
        y = torch.where(mask[..., None] > 0, x, 0)
        return y / (y.square().sum(1, keepdim=True) + 1e-12).sqrt()

    def kernel(x, mask):
        y = x * mask[..., None]
        return y / (y.square().sum(1, keepdim=True) + 1e-9).sqrt()

    messages = texts(check(kernel, golden, masked_rows, grads=("x",)), "scaling")
    assert any("2^-12" in text for text in messages), messages


# NaN, and kernels that pass it on


@assay.case(N=[5], C=[6])
def steps(make, N, C):
    return {"x": make.normal(N, C)}


def guarded(x):
    z = x.float()
    return torch.where(z > 20, z, torch.log1p(torch.exp(z.clamp(max=20)))).to(x.dtype)


@BOTH
@SEEDS
def test_a_guard_that_stops_the_gradient_of_nan_alone_is_a_note(dtype, seed):
    report = check(guarded, F.softplus, steps, dtype, seed)
    assert report.ok and "nan_gradient" in notes(report), str(report)


def test_nan_that_an_output_or_another_gradient_swallows_is_certain():
    def output(x):
        return torch.nan_to_num(guarded(x))

    class Others(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            p = torch.softmax(x, -1)
            ctx.save_for_backward(p)
            return p

        @staticmethod
        def backward(ctx, g):
            (p,) = ctx.saved_tensors
            return torch.nan_to_num(p * (g - (g * p).sum(-1, keepdim=True)))

    for kernel, golden in ((output, F.softplus), (Others.apply, lambda x: torch.softmax(x, -1))):
        messages = texts(check(kernel, golden, steps), "scaling")
        assert any(text.startswith("values:nan is swallowed") for text in messages), messages


# torch's own functions, whose formula cannot be chosen


@assay.case(N=[6], C=[37])
def logits(make, N, C):
    return {"x": make.normal(N, C, std=3.0), "t": make.uniform(N, C)}


def losses():
    def entropy(x, t):
        return F.binary_cross_entropy_with_logits(x, t, reduction="none")

    def textbook(x, t):
        return x.clamp(min=0) - x * t + torch.log1p(torch.exp(-x.abs()))

    def by_softplus(x, t):
        return F.softplus(x) - x * t

    def by_logarithms(x, t):
        return -t * F.logsigmoid(x) - (1 - t) * F.logsigmoid(-x)

    def added(x, t):
        return x + F.softplus(t - x)

    def clipped(x, t):
        return x * (x + 3).clamp(0, 6) / 6

    def hardswish(x, t):
        return F.hardswish(x)

    yield from (("bce", entropy, kernel) for kernel in (textbook, by_softplus, by_logarithms))
    yield "logaddexp", torch.logaddexp, added
    yield "hardswish", hardswish, clipped


@pytest.mark.sweep(3)
@BOTH
@SEEDS
@pytest.mark.parametrize(
    "golden, kernel", [(g, k) for _, g, k in losses()], ids=[f"{n} {k.__name__}" for n, _, k in losses()]
)
def test_the_usual_formulas_of_a_function_of_torch_are_right(golden, kernel, dtype, seed):
    def cast(x, t):
        return kernel(x.float(), t.float()).to(x.dtype)

    report = check(cast, golden, logits, dtype, seed, grads=("x",))
    assert report.ok, str(report)


def test_a_slightly_wrong_entropy_is_found():
    def coarse(x, t):
        return x.clamp(min=0) - x * t + torch.log(1 + 2.0**-18 + torch.exp(-x.abs()))

    entropy = next(g for n, g, _ in losses() if n == "bce")
    assert not check(coarse, entropy, logits, grads=("x",)).ok


@assay.case(B=[2], L=[16])
def signals(make, B, L):
    return {"x": make.normal(B, L), "k": make.normal(L)}


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.sweep(3, part=n)) for n in range(3)])
def test_a_transform_over_a_whole_axis_passes(seed):
    """Every element rounds at the size of the largest: a note says so, and no finding claims a leak."""

    def golden(x, k):
        rows = [(x[:, : t + 1] * k[: t + 1].flip(0)).sum(-1) for t in range(x.shape[1])]
        return torch.stack(rows, 1)

    def transform(x, k):
        n = 2 * x.shape[1]
        return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k, n), n)[:, : x.shape[1]]

    diagnosis = assay.diagnose(target(transform, golden, signals), seed=seed)
    assert not {"wrong_mask", "wrong_axis"} & {c.id for c in diagnosis.causes[:1]}, str(diagnosis)
    assert not texts(check(transform, golden, signals, seed=seed), "taint")


# any formula


@assay.case(T=[20], D=[6])
def decays(make, T, D):
    return {"x": make.normal(T, D), "decay": 0.2 + 0.75 * make.uniform(T, D)}


def step_by_step(x, decay):
    h, rows = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = decay[t] * h + x[t]
        rows.append(h)
    return torch.stack(rows)


def by_doubling(x, decay):
    distance = 1
    while distance < len(x):
        h = torch.addcmul(x[distance:], decay[distance:], x[:-distance])
        decay = torch.cat([decay[:distance], decay[distance:] * decay[:-distance]])
        x, distance = torch.cat([x[:distance], h]), 2 * distance
    return x * 1


def scans(kernel, formula, probes):
    target = assay.Target(kernel, step_by_step, cases=decays, formula=formula)
    return [assay.check(target, probes=probes, seed=seed, raises=False) for seed in (3, 9, 11)]


def test_any_formula_may_round_by_the_numbers_beside_a_result():
    assert not all(report.ok for report in scans(by_doubling, "golden", "values"))
    for report in scans(by_doubling, "any", "default"):
        assert report.ok, str(report)
    for report in scans(lambda x, decay: by_doubling(x, decay) * (1 + 2.0**-18), "any", "values"):
        assert not report.ok


def test_a_row_that_only_multiplies_zero_need_not_be_read():
    """decay[0] meets h = 0, so the golden passes on nothing but its NaN."""
    for report in scans(by_doubling, "golden", "taint"):
        assert not any("has no influence" in f.text for f in report.findings), str(report)


# another formula of the same function, whose terms the results do not show


@assay.case(N=[5, 33], D=[17])
def modulated(make, N, D):
    return {"x": make.normal(N, D), "s": make.normal(D), "b": make.normal(D)}


def modulation(x, s, b):
    return x * (1 + s) + b


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_products_is_as_good_as_a_factored_one_where_any_formula_is_right(seed):
    """Where 1 + s is near 0, x + x s errs by a rounding of x, and the golden by one of x (1 + s)."""
    assert check(lambda x, s, b: x + x * s + b, modulation, modulated, seed=seed, formula="any").ok
    assert not check(lambda x, s, b: x + x * s + b * (1 + 1e-5), modulation, modulated, seed=seed, formula="any").ok


@assay.case(B=[3], T=[9], D=[4])
def gated(make, B, T, D):
    return {"x": make.normal(B, T, D), "dt": make.normal(B, T, D)}


def scan(x, dt):
    state, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.exp(-1.5 * F.softplus(dt[:, t])) * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1)


def segments(x, dt, past=0):
    """The quadratic form of Mamba-2: decays as exponentials of differences of a cumulative sum."""
    sums = (-1.5 * F.softplus(dt)).cumsum(1)
    later = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(past)
    return ((sums[:, :, None] - sums[:, None]).masked_fill(later[..., None], -torch.inf).exp() * x[:, None]).sum(2)


@pytest.mark.parametrize("seed", range(3))
def test_a_gated_scan_by_segments_is_right_where_any_formula_is(seed):
    """The gradient of the first gate is exactly 0, and there the difference of two sums, however large the gate is."""
    assert check(segments, scan, gated, seed=seed, formula="any").ok
    assert not check(lambda x, dt: segments(x, dt, past=1), scan, gated, seed=seed, formula="any").ok
