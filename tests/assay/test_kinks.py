"""At ties and kinks several gradients are right, elsewhere one; a gradient far from all of them is wrong."""

import pytest
import torch

from assay.kernels import target, texts
from goldsmith import assay
from goldsmith.assay.bounds.running_errors import running_bounds

pytestmark = pytest.mark.sweep(2)


class Chosen(torch.autograd.Function):
    """The maximum of every row; `gets(tied)` selects the tied elements that get its gradient."""

    @staticmethod
    def forward(ctx, x, gets):
        y = x.amax(-1, keepdim=True)
        ctx.save_for_backward(gets((x == y) | (x != x)).to(x.dtype))
        return y.squeeze(-1)

    @staticmethod
    def backward(ctx, g):
        (share,) = ctx.saved_tensors
        return g.unsqueeze(-1) * share, None


def first(tied):
    return tied & (tied.cumsum(-1) == 1)


def last(tied):
    return first(tied.flip(-1)).flip(-1)


def equal(tied):
    return tied / tied.sum(-1, keepdim=True)


@assay.case(levels=[4, 1000000])
def levels(make, levels):
    return {"x": make.tied(13, 40, levels=levels)}


def maxima(gets, golden):
    return target(lambda x: Chosen.apply(x, gets), golden, levels, backward="auto")


@pytest.mark.parametrize("seed", range(6))
def test_a_golden_with_a_tied_median_is_not_at_fault(seed):
    @assay.case(T=[7])
    def tied(make, T):
        return {"x": make.tied(T, 31, levels=3)}

    def median(x):
        return x.median(-1).values

    assert assay.check(target(median, median, tied), seed=seed, probes="values").ok


def test_a_wrong_golden_gradient_is_found_despite_ties():
    @assay.case(T=[7])
    def tied(make, T):
        return {"x": make.tied(T, 31, levels=3)}

    golden = lambda x: x.median(-1).values + gate(torch.sin, lambda x: 1.01 * torch.cos(x))(x).sum(-1)  # noqa: E731
    report = assay.check(target(golden, golden, tied, backward="auto"), probes="values", raises=False)
    assert report.verdict == "reference_fault" and "disagrees with central differences" in texts(report)[0]


GOLDENS = {"amax": lambda x: x.amax(-1), "max": lambda x: x.max(-1).values, "topk": lambda x: x.topk(1).values[..., 0]}


@pytest.mark.parametrize("gets", [first, last, equal])
@pytest.mark.parametrize("golden", GOLDENS)
def test_any_of_equal_elements_may_get_the_gradient(golden, gets):
    report = assay.check(maxima(gets, GOLDENS[golden]))
    assert {n.case for n in report.notes if n.id == "tie"} <= {"levels[levels=4]"}


def test_the_note_says_where_another_choice_was_made():
    report = assay.check(maxima(last, GOLDENS["amax"]), "levels[levels=4]", probes="values")
    (note,) = [n for n in report.notes if n.id == "tie"]
    assert note.tensor == "x.grad" and "of 520 elements of x.grad lie where the golden has a tie or a kink" in note.text


@pytest.mark.parametrize(
    "wrong", [lambda tied: first(tied) * 7.0, lambda tied: first(tied).roll(1, -1), lambda tied: first(tied) * -1.0]
)
def test_a_gradient_that_no_choice_explains_is_wrong(wrong):
    report = assay.check(maxima(wrong, GOLDENS["amax"]), levels[1], probes="values", raises=False)
    assert [f.tensor for f in report.findings] == ["x.grad"] and report.findings[0].rung == "CERTAIN"


def test_elements_away_from_ties_are_judged_as_usual():
    shifted = maxima(lambda tied: first(tied).roll(1, -1), GOLDENS["amax"])
    report = assay.check(shifted, levels[0], probes="values", raises=False)
    assert [f.tensor for f in report.findings] == ["x.grad"] and report.findings[0].rung == "CERTAIN"


def test_a_pool_of_nothing_but_zeros_may_give_its_gradient_to_any_of_them():
    @assay.case(T=[5])
    def zeros(make, T):
        return {"x": torch.relu(make.normal(T, 30) - 1.5)}

    def pooled(x):
        return Chosen.apply(x.unfold(-1, 5, 2), last)

    assert assay.check(target(pooled, lambda x: torch.nn.functional.max_pool1d(x, 5, 2), zeros, backward="auto")).ok


def gate(f, slope):
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(slope(x).to(x.dtype))
            return f(x)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    return Gate.apply


@assay.case(T=[13])
def with_zeros(make, T):
    x = make.normal(T, 24)
    return {"x": torch.where(x.abs() < 0.5, 0.0, x)}


GATES = {
    "relu open": (torch.relu, lambda x: x >= 0),
    "relu shut": (torch.relu, lambda x: x > 0),
    "abs": (torch.abs, lambda x: torch.where(x < 0, -1.0, 1.0)),
    "clamp shut": (lambda x: x.clamp(0, 1), lambda x: (x > 0) & (x < 1)),
    "clamp open": (lambda x: x.clamp(0, 1), lambda x: (x >= 0) & (x <= 1)),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_at_its_kink_may_be_open_or_closed(name):
    f, slope = GATES[name]
    assert assay.check(target(gate(f, slope), f, with_zeros, backward="auto")).ok


@pytest.mark.parametrize("dtype, off", [(torch.float64, 2.0**-40), (torch.float32, 2.0**-10)])
def test_a_wrong_smooth_gradient_is_never_excused(dtype, off):
    """Ill-conditioned on purpose: the gradient is a difference of much larger terms."""

    def golden(x, w):
        return torch.exp(3 * x) * torch.sin(9 * w).sum() / (1.001 + torch.cos(5 * x))

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return golden(x, w)

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                grads = torch.autograd.grad(golden(*leaves), leaves, g)
            return tuple(t * (1 + off) for t in grads)

    @assay.case(T=[40])
    def few(make, T):
        return {"x": make.normal(T), "w": make.normal(7)}

    one = target(Off.apply, golden, few, backward="auto", dtypes=(dtype,), grads=("x",))
    report = assay.check(one, probes=("values", "ensemble"), raises=False)
    assert [f.tensor for f in report.findings] == ["x.grad"] and not [n for n in report.notes if n.id == "tie"]


def test_a_gate_within_the_rounding_of_a_sum_may_fall_either_way():
    @assay.case(seed=list(range(4)))
    def cancelling(make, seed):
        a, b = make.normal(13, 64), make.normal(64, 3)
        b[:, 1] -= a[0] * (a[0] @ b[:, 1]) / (a[0] @ a[0])  # a[0] @ b[:, 1] is pure rounding
        return {"a": a, "b": b}

    def kernel(a, b):
        z = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            z = z + a[:, k : k + 1] * b[k]
        return torch.relu(z)

    assert assay.check(target(kernel, lambda a, b: torch.relu(a @ b), cancelling), probes=("values", "ensemble")).ok


def test_a_gate_that_is_open_below_its_kink_is_wrong():
    leaking = gate(torch.relu, lambda x: x > -1.0)
    report = assay.check(target(leaking, torch.relu, with_zeros, backward="auto"), probes="values", raises=False)
    assert [f.rung for f in report.findings] == ["CERTAIN"] and report.findings[0].tensor == "x.grad"


def test_gates_summed_after_a_product_pass():
    @assay.case(T=[13])
    def sparse(make, T):
        return {"a": torch.where(make.normal(T, 4).abs() < 1, 0.0, make.normal(T, 4)), "b": make.normal(4, 9)}

    gated = gate(torch.relu, lambda x: x >= 0)
    assert assay.check(target(lambda a, b: gated(a @ b), lambda a, b: torch.relu(a @ b), sparse, backward="auto")).ok


def test_a_maximum_over_windows_passes_the_taint_probe():
    @assay.case(T=[4], D=[9])
    def rows(make, T, D):
        return {"x": make.normal(T, 3, D)}

    def pooled(x):
        return Chosen.apply(x.unfold(-1, 3, 1), last)

    golden = lambda x: torch.nn.functional.max_pool1d(x, 3, 1)  # noqa: E731
    assert assay.check(target(pooled, golden, rows, backward="auto"), probes=("taint", "scaling")).ok


@pytest.mark.parametrize("seed", range(4))
def test_nan_at_a_tie_is_judged_like_other_values_there(seed):
    """With NaN in a window amax gives NaN to all elements; tied ones shared the gradient before, unlike the golden's.

    Numbers in place of NaN remove that share: at the tie the gradient moves where the golden's does not.
    """

    @assay.case(T=[5, 9], D=[8])
    def tied(make, T, D):
        return {"x": make.tied(T, D, levels=4)}

    def pooled(x):
        return torch.nn.functional.max_pool1d(x[:, None], 4)[:, 0]

    shared = target(lambda x: x.unflatten(-1, (2, 4)).amax(-1), pooled, tied)
    report = assay.check(shared, seed=seed, raises=False)
    assert report.ok, str(report)
    assert "tie" in {n.id for n in report.notes}
    if seed == 1:
        assert not assay.diagnose(shared, seed=seed).causes
    stray = target(lambda x: x.unflatten(-1, (2, 4)).amax(-1) + 2**-6 * (x[:1, :2] - x[:1, :2].detach()), pooled, tied)
    assert not assay.check(stray, seed=seed, raises=False).ok


def test_a_maximum_that_ignores_its_last_column_is_found():
    @assay.case(T=[4], D=[9])
    def rows(make, T, D):
        return {"x": torch.cat([make.normal(T, D - 1), make.full(T, 1, value=-50.0)], 1)}

    report = assay.check(target(lambda x: x[:, :8].amax(1), lambda x: x.amax(1), rows), probes="taint", raises=False)
    assert any("x[axis D = 8] has no influence on y" in t for t in texts(report, "taint"))


@pytest.mark.parametrize(
    "choose", [lambda x: x.sort(0).values[1], lambda x: x.kthvalue(2, 0).values, lambda x: x.median(0).values,
               lambda x: x.max(0).values, lambda x: x.topk(2, 0).values[0]],
)  # fmt: skip
def test_which_element_is_chosen_is_uncertain_among_those_that_rounding_cannot_tell_apart(choose):
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    weight = 1 + torch.rand(3, 5, generator=generator, dtype=torch.float64)

    def fn(leaves):
        x = leaves["x"].requires_grad_()
        y = choose(x * weight)
        return {"y": y, "x.grad": torch.autograd.grad(y.sum(), x)[0]}

    for x, known in ((apart, True), (1 / weight, False)):  # 1 / weight * weight: equal up to a rounding
        bounds = running_bounds(fn, {"x": x.float().double()}, compute=torch.float32, stores={})
        assert not bool(bounds["y"].open.any()) and not bounds["y"].notes
        assert bool(bounds["x.grad"].open.any()) != known


@pytest.mark.parametrize("at_zero", [0.0, 1.0])
def test_repeated_zeros_are_not_a_mask(at_zero):
    """With stride 0 the first element is repeated everywhere, on the kink."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * torch.where(x == 0, at_zero, (x > 0).to(g.dtype))

    inputs = {"x": torch.tensor([[0.0, -8.0, 3.0, 0.5, -1.0]])}
    report = assay.check(
        target(Gate.apply, lambda x: torch.relu(x), inputs, backward="auto"), probes="layouts", raises=False
    )
    assert report.ok, str(report)
