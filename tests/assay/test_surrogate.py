"""A golden with a declared surrogate gradient, such as a straight-through estimator."""

import pytest
import torch

from goldsmith import assay


def draw(make, R=9, C=16):
    return {"x": make.normal(R, C), "gain": make.normal(C)}


def rounded(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def detached(x, gain):
    return {"y": (x + (rounded(x) - x).detach()) * gain}


def plain(x, gain):
    return {"y": rounded(x) * gain}


def straight(x, gain, grad_y):
    return {"x": grad_y * gain, "gain": (grad_y * rounded(x)).sum(0)}


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, factor):
        ctx.save_for_backward(x, gain)
        ctx.factor = factor
        return rounded(x) * gain

    @staticmethod
    def backward(ctx, dy):
        x, gain = ctx.saved_tensors
        return dy * gain * ctx.factor, (dy * rounded(x)).sum(0), None


def target(factor=1.0, golden=detached, **options):
    def kernel(x, gain):
        return {"y": Kernel.apply(x, gain, factor)}

    return assay.Target(kernel, golden, cases=[assay.Case("rows", draw, {})], name="ste", **options)


GOLDENS = pytest.mark.parametrize(
    "options", [{}, {"golden": plain, "golden_backward": straight}], ids=["detach", "own"]
)


@GOLDENS
def test_a_kernel_is_compared_with_a_declared_surrogate(options):
    report = assay.check(target(surrogate=("x",), **options), device="cpu")
    assert report.verdict == "pass"
    assert [n.text for n in report.notes if n.id == "golden"] == [
        "declared as surrogate, not compared with differences: the gradient of x"
    ]
    wrong = assay.check(target(1.01, surrogate=("x",), **options), device="cpu", raises=False)
    assert wrong.verdict == "fail" and {f.tensor for f in wrong.findings} == {"x.grad"}


@GOLDENS
def test_an_undeclared_surrogate_is_a_golden_fault_whose_message_says_what_to_declare(options):
    report = assay.check(target(**options), device="cpu", raises=False)
    assert report.verdict == "reference_fault"
    assert report.findings[0].text.endswith(
        "if it is not meant to be a derivative (straight-through), declare surrogate=('x',)"
    )


def test_the_other_gradients_are_still_compared_with_differences():
    def forgets_the_gain(x, gain, grad_y):
        return {**straight(x, gain, grad_y), "gain": 2 * (grad_y * rounded(x)).sum(0)}

    options = {"golden": plain, "golden_backward": forgets_the_gain, "surrogate": ("x",)}
    report = assay.check(target(**options), device="cpu", raises=False)
    assert report.verdict == "reference_fault" and "random direction: gain (" in report.findings[0].text


@pytest.mark.parametrize("options", [{"surrogate": ("z",)}, {"surrogate": ("x",), "grads": ("gain",)}])
def test_a_surrogate_that_has_no_gradient_is_refused(options):
    with pytest.raises(assay.TargetError, match=r"surrogate: .* inputs with gradients"):
        target(**options)
