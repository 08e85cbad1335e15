"""A candidate with outputs without a gradient: the golden is checked on the outputs that have one."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.golden.self_check import self_check


@assay.case(T=[4], D=[6])
def small(make, T, D):
    return {"x": make.normal(T, D)}


class Normed(torch.autograd.Function):
    """(x r, r) with r = 1 / rms; r carries no gradient."""

    @staticmethod
    def forward(ctx, x):
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, r)
        ctx.mark_non_differentiable(r)
        return x * r, r

    @staticmethod
    def backward(ctx, g, _):
        x, r = ctx.saved_tensors
        return r * g - x * r**3 * (g * x).mean(-1, keepdim=True)


def normed(x):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x * r, r


def normed_on_purpose(x):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x * r, r.detach()


def examined(kernel, golden, **more):
    target = assay.Target(kernel, golden, cases=small, outputs=("y", "r"), name="kernel", **more)
    return assay.check(target, probes="quick", raises=False)


PAIRS = {
    "marked as not differentiable": (Normed.apply, normed),
    "detached": (lambda x: (x * 2, (x * 3).detach()), lambda x: (x * 2, x * 3)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_golden_passes_if_an_output_of_the_candidate_has_no_gradient(pair):
    report = examined(*PAIRS[pair])
    assert report.verdict != "reference_fault" and not any(f.probe == "golden" for f in report.findings), str(report)
    messages = [*(f.text for f in report.findings), *(n.text for n in report.notes)]
    assert any(t.startswith("r of the candidate does not require grad") for t in messages), str(report)
    assert all(r.state == "ok" for r in report.rows if r.tensor == "x.grad")


def test_a_golden_that_detaches_the_same_output_passes():
    report = examined(Normed.apply, normed_on_purpose)
    assert report.ok and not report.notes, str(report)


def test_a_golden_with_a_wrong_gradient_of_a_differentiable_output_fails():
    report = examined(Normed.apply, lambda x: (x * normed(x)[1].detach(), normed(x)[1]))
    assert report.verdict == "reference_fault", str(report)
    assert "the golden's gradient disagrees with central differences" in report.findings[0].text


def test_differences_use_the_outputs_that_got_a_gradient():
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def forward(own):
        return {"y": own["x"] * 2, "r": own["x"] * 3}

    def gradient(own, cotangents):
        assert set(cotangents) == {"grad_y"}
        return {"x": 2 * cotangents["grad_y"]}

    assert self_check(forward, gradient, {"x": x}, sent=("y",)).problems == []
    assert self_check(forward, lambda own, sent: {"x": 2 * sent["grad_y"]}, {"x": x}).problems
