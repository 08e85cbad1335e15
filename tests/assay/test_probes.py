"""For every probe, a wrong kernel that only this probe finds, and a similar right kernel that it passes."""

import pytest
import torch

from assay.kernels import (
    autograd,
    long_dot,
    normed,
    plain_sum,
    probes_of,
    rmsnorm,
    sum_gradients,
    target,
    weighted_sum,
)
from goldsmith import assay
from goldsmith.assay.probes import NAMES

PAIRS = {}


def pair(probe):
    """Registers a function that returns (wrong, right)."""

    def register(make):
        PAIRS[probe] = make
        return make

    return register


@pair("values")
def a_factor():
    return target(lambda x, w: plain_sum(x, w) * 1.001), target(lambda x, w: plain_sum(x.flip(-1), w.flip(-1)))


@pair("ensemble")
def tf32_where_float32_was_promised():
    def product(a, b):
        return a @ b

    def rounded(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def kernel(a, b):
        return rounded(a) @ rounded(b)

    return (target(kernel, product, long_dot, backward=None, dot=d) for d in ("ieee", "tf32"))


@pair("statistics")
def an_epsilon_forgotten():
    return (
        target(lambda x, w, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w, rmsnorm, normed),
        target(lambda x, w, eps: x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * w, rmsnorm, normed),
    )


@pair("poison")
def a_semaphore_that_nobody_has_set_to_zero():
    """The kernel leaves the counter at zero, but a caller that takes fresh memory for zeros must set it first."""

    def kernel(fresh):
        kept = {}

        def call(x, w):
            counter = kept.setdefault("counter", fresh(1))
            y = plain_sum(x, w) + counter.clone()
            counter.zero_()
            return y

        return call

    return target(kernel(torch.empty)), target(kernel(torch.zeros))


@pair("guard")
def one_element_past_the_end():
    def kernel(extra):
        def call(x, w):
            y = torch.empty(len(x))
            torch.as_strided(y, (len(x) + extra,), (1,), y.storage_offset()).fill_(0)
            return y.copy_(plain_sum(x, w).detach()) if not x.requires_grad else y * 0 + plain_sum(x, w)

        return call

    return target(kernel(1)), target(kernel(0))


@pair("alias")
def an_input_overwritten():
    def kernel(x, w):
        y = plain_sum(x, w)
        x.zero_()
        return y

    return target(kernel, backward=None), target(kernel, backward=None, mutates=("x",))


@pair("second_call")
def a_buffer_that_every_call_returns():
    def kernel(own):
        buffers = {}

        def call(x, w):
            out = buffers.setdefault(tuple(x.shape), torch.zeros(len(x)))
            out.copy_(plain_sum(x, w))
            return out.clone() if own else out

        return call

    return target(kernel(False), backward=None), target(kernel(True), backward=None)


@pair("layouts")
def only_dense_gradients():
    def strict(x, w, g):
        if not g.is_contiguous():
            raise RuntimeError("grad must be contiguous")
        return sum_gradients(x, w, g)

    return target(autograd(plain_sum, strict)), target(
        autograd(plain_sum, lambda x, w, g: strict(x, w, g.contiguous()))
    )


@pair("repeats")
def scratch_shared_by_threads():
    def kernel(lost):
        def call(x, w):
            terms = x * w
            if torch.get_num_threads() > 1:  # another order, and only the wrong kernel loses a term
                terms = terms.flip(-1)[:, lost:]
            return terms.sum(-1)

        return call

    return target(kernel(1)), target(kernel(0))


@pair("scaling")
def a_softmax_without_its_maximum():
    def golden(x, w):
        return torch.softmax(x * w, -1)

    def wrong(x, w):
        e = torch.exp(x * w)
        return e / e.sum(-1, keepdim=True)

    def right(x, w):
        e = torch.exp(x * w - (x * w).amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    return target(wrong, golden), target(right, golden)


@pair("taint")
def an_element_beyond_the_end_behind_a_maximum():
    """The memory beyond the end holds NaN, which a comparison drops."""

    def right(x, w):
        return (x * w).amax(-1)

    def wrong(x, w):
        stray = x.as_strided((), (), x.storage_offset() + x.numel())
        return torch.where(stray > right(x, w), stray, right(x, w))

    return target(wrong, right, backward=None), target(right, right, backward=None)


@pair("decisions")
def dropout_at_another_rate():
    @assay.case(T=[64], D=[128])
    def rates(make, T, D):
        return {"x": make.normal(T, D), "p": 0.25}

    def golden(x, p):
        return x * assay.stage("mask", torch.ones_like(x)) / (1 - p)

    def kernel(change):
        def call(x, p):
            mask = assay.stage("mask", (torch.rand_like(x) >= p + change).to(x.dtype))
            return x * mask / (1 - p)

        return call

    declared = {"mask": assay.given(rate="p")}
    return (target(kernel(c), golden, rates, decisions=declared) for c in (0.05, 0.0))


@pair("float32")
def a_factor_that_bfloat16_hides():
    def kernel(factor):
        return lambda x, w, eps: (rmsnorm(x.float(), w.float(), eps) * factor).to(x.dtype)

    return (target(kernel(f), rmsnorm, normed, dtypes=(torch.bfloat16,)) for f in (1 + 2.0**-14, 1.0))


@pair("calls")
def other_numbers_for_a_tensor_with_nothing_around_it():
    """The guard bands of every other probe make a storage larger than its tensor."""

    def kernel(factor):
        def call(x, w):
            y = plain_sum(x, w)
            return y * factor if x.untyped_storage().nbytes() == x.nbytes else y

        return call

    return target(kernel(1.001)), target(kernel(1))


@pytest.mark.parametrize("probe", NAMES)
def test_every_probe_finds_what_only_it_finds(probe):
    wrong, _ = PAIRS[probe]()
    report = assay.check(wrong, raises=False)
    assert report.verdict == "fail" and probes_of(report) == {probe}, str(report)


@pytest.mark.parametrize("probe", [p for p in NAMES if p != "values"])
def test_without_its_probe_a_wrong_kernel_passes(probe):
    """The plain calls are left out too: they come last and see some of what the others see."""
    wrong, _ = PAIRS[probe]()
    report = assay.check(wrong, probes=[p for p in NAMES if p not in (probe, "calls")], raises=False)
    assert report.ok, str(report)


@pytest.mark.parametrize("probe", NAMES)
def test_every_probe_leaves_the_right_kernel_alone(probe):
    _, right = PAIRS[probe]()
    report = assay.check(right, raises=False, strict=True)
    assert report.ok and not report.findings, str(report)
    assert {p.name for p in report.probes if p.ran} >= set(NAMES) - {"float32"}


def test_values_alone_finds_the_factor():
    wrong, _ = PAIRS["values"]()
    assert probes_of(assay.check(wrong, probes="values", raises=False)) == {"values"}


def test_statistics_describes_a_wrong_tensor():
    def seen(kernel, golden=weighted_sum, **more):
        report = assay.check(target(kernel, golden, **more), probes="statistics", raises=False)
        return [n.text for n in report.notes if n.id == "pattern"]

    def scaled(x, w):
        return x * w

    assert "y is 2 times the golden" in seen(lambda x, w: 2 * plain_sum(x, w))[0]
    assert "y is zero in 100.0%" in seen(lambda x, w: 0 * plain_sum(x, w))[0]
    assert any("shifted by 1 along axis 0" in t for t in seen(lambda x, w: plain_sum(x, w).roll(1, 0)))
    assert any(
        "rows of axis 0 in another order" in t
        for t in seen(lambda x, w: scaled(x, w)[torch.tensor([3, 0, 2, 1, *range(4, 12)])], scaled)
    )
    assert any("first half only" in t for t in seen(lambda x, w: torch.cat([plain_sum(x, w)[:6], torch.zeros(6)])))


def forty_steps(x, w):
    """Normalised forty times: the error analysis leaves its bound open, so only legal orders measure the noise."""
    h = torch.exp(x * w * 0.1)
    for _ in range(20):
        h = h / h.sum(-1, keepdim=True)
        h = h / h.sum(0, keepdim=True)
    return h


OPEN_FAULTS = {
    "second_call": lambda kept, x, w: kept.setdefault(tuple(x.shape), forty_steps(x, w).detach()).clone(),
    "layouts": lambda kept, x, w: forty_steps(x, w) * (1.5 if 0 in x.stride() else 1.0),
}


@pytest.mark.parametrize("probe", OPEN_FAULTS)
def test_gross_errors_are_found_where_bounds_are_open(probe):
    """In runs without an ensemble of their own."""
    kept = {}

    def kernel(x, w):
        return OPEN_FAULTS[probe](kept, x, w)

    one = target(kernel, forty_steps, backward=None)
    report = assay.check(one, probes=["values", "ensemble", probe], raises=False)
    assert {r.tensor for r in report.rows if r.run == "values" and r.state == "bad"} == set()
    matches = [f for f in report.findings if f.probe == probe]
    assert matches and any("of its size" in f.text for f in matches), str(report)
    right = assay.check(target(forty_steps, forty_steps, backward=None), raises=False)
    assert right.ok and "not_proven" in {n.id for n in right.notes}


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("broken", ["raises", "drops", "zeros", ""])
def test_a_gradient_for_one_of_several_outputs_alone_is_tried(broken, unused):
    """As `loss.backward()` of (loss, z) sends it: a Function that wants no zeros gets None for z."""

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.set_materialize_grads(broken == "zeros")
            ctx.save_for_backward(x, w)
            return x * w, x + w

        @staticmethod
        def backward(ctx, *sent):
            x, w = ctx.saved_tensors
            missing = sent[unused] is None or not sent[unused].any()
            if missing and broken in ("drops", "zeros"):
                return torch.zeros_like(x), torch.zeros_like(w)
            if not (missing and broken):
                sent = [torch.zeros_like(x) if g is None else g for g in sent]
            a, b = sent
            return a * w + b, (a * x).sum(0) + b.sum(0)

    two = target(Two.apply, lambda x, w: (x * w, x + w))
    report = assay.check(two, probes=["values", "layouts"], raises=False)
    assert report.ok == (not broken), str(report)
    name = f"y{1 - unused}"
    if broken == "raises":
        (finding,) = report.findings
        assert f"raised in its backward (a gradient for {name} alone" in finding.text and finding.probe == "layouts"
    elif broken:
        assert any(f"(grad_{name} alone)" in f.text for f in report.findings), str(report)
