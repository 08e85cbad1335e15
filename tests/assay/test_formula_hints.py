"""Right kernels whose formula adds larger numbers than the golden's get a hint about what to declare."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels import target, texts
from goldsmith import assay
from goldsmith.assay.probes.taint import LITTLE

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def check(kernel, golden, cases, dtype=torch.float32, seed=0, **more):
    return assay.check(target(kernel, golden, cases, dtypes=(dtype,), **more), seed=seed, raises=False)


def huber(x, y):
    d = (x - y).abs()
    near = d.clamp(max=1)
    return 0.5 * near * near + (d - near)


@assay.case(N=[6], C=[37])
def pairs(make, N, C):
    return {"x": make.normal(N, C, std=3.0), "t": make.uniform(N, C)}


@assay.case(N=[6], C=[37])
def alone(make, N, C):
    return {"x": make.normal(N, C, std=3.0)}


@assay.case(N=[9], C=[77])
def mild(make, N, C):
    return {"x": make.normal(N, C)}


FORMULAS = {
    "softplus": (lambda x, t: x - F.logsigmoid(x), lambda x, t: F.softplus(x)),
    "huber": (lambda x, t: huber(x, t), lambda x, t: F.huber_loss(x, t, reduction="none")),
    "silu": (lambda x, t: 0.5 * x * (1 + torch.tanh(0.5 * x)), lambda x, t: F.silu(x)),
    "sigmoid": (lambda x, t: 0.5 * (1 + torch.tanh(0.5 * x)), lambda x, t: torch.sigmoid(x)),
    "bce": (
        lambda x, t: (1 - t) * x + F.softplus(-x),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
    ),
}
HINT = "roundings of the numbers beside it, as for another formula"


@pytest.mark.parametrize("name", FORMULAS)
def test_rounding_at_another_size_gets_a_hint_and_passes_by_its_own_formula(name):
    kernel, golden = FORMULAS[name]
    grads = ("x", "t") if name == "huber" else ("x",)
    report = check(kernel, golden, pairs, grads=grads)
    certain = [f for f in report.findings if f.rung == "CERTAIN"]
    assert certain and all(HINT in f.text or LITTLE in f.text for f in certain), str(report)
    assert check(kernel, lambda x, t: kernel(x, t), pairs, grads=grads).ok


@pytest.mark.parametrize("off", [2.0**-14, 2.0**-12, 0.01])
def test_a_larger_error_gets_no_formula_hint(off):
    kernel, golden = FORMULAS["softplus"]
    report = check(lambda x, t: kernel(x, t) * (1 + off), golden, pairs, grads=("x",))
    assert not report.ok and not any(HINT in f.text for f in report.findings if f.probe == "values"), str(report)


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_a_tanh_made_of_a_sigmoid_is_right(dtype, seed):
    """Triton has no tanh, so its kernels write it this way."""

    def kernel(x):
        return (2 * torch.sigmoid(2 * x.float()) - 1).to(x.dtype)

    report = check(kernel, lambda x: torch.tanh(x), alone, dtype, seed)
    assert report.ok, str(report)


def test_a_tanh_that_is_off_by_more_is_wrong():
    assert not check(lambda x: torch.tanh(x) + 2.0**-20, lambda x: torch.tanh(x), alone).ok


def test_a_floor_under_small_numbers_is_no_other_formula():
    """At inputs times 2^12 it is 30 orders of magnitude above a golden that rounding of inputs does not move."""
    report = check(lambda x: torch.softmax(x, -1).clamp(min=1e-12), lambda x: torch.softmax(x, -1), mild)
    assert any("exceeds its rounding bound" in text for text in texts(report, "scaling")), str(report)


def test_nan_in_one_of_two_inputs_whose_difference_is_clamped_is_a_note():
    @assay.case(N=[6], C=[37])
    def halves(make, N, C):
        return {"x": make.normal(N, C), "y": make.normal(N, C)}

    def kernel(x, y):
        return huber(x.float(), y.float()).to(x.dtype)

    report = check(kernel, lambda x, y: F.huber_loss(x, y, reduction="none"), halves, torch.bfloat16)
    messages = texts(report, "scaling")
    assert all(HINT in text for text in messages) and not any("nan" in text for text in messages), str(report)
    assert "nan_gradient" in {n.id for n in report.notes}, str(report)


def test_an_overflow_in_a_formula_is_reported_with_the_probe_to_leave_out():
    """On probabilities, Sinkhorn's steps divide 0 by 0 for logits thousands apart; on logarithms they do not."""

    @assay.case(T=[5], N=[4])
    def mixing(make, T, N):
        return {"z": make.normal(T, N, N)}

    def by_logarithms(z):
        for _ in range(6):
            z = z - torch.logsumexp(z, -1, keepdim=True)
            z = z - torch.logsumexp(z, -2, keepdim=True)
        return z.exp()

    def by_probabilities(z):
        p = torch.exp(z - z.amax((-1, -2), keepdim=True))
        for _ in range(6):
            p = p / p.sum(-1, keepdim=True)
            p = p / p.sum(-2, keepdim=True)
        return p

    report = check(by_probabilities, by_logarithms, mixing)
    assert {f.probe for f in report.findings} == {"scaling"}
    text = "(scale:2^12); where such inputs never come, exclude them by where= of the case"
    assert any(text in f.text for f in report.findings), str(report)
