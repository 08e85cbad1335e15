"""A mistake that many people make is wrong, and no trick: the evidence of a trick fits nothing else."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate.tricks import reasons
from goldsmith.assay.report.results import Finding

SOFTMAX = """
import torch

class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return FACTOR * (g - (g * y).sum(-1, keepdim=True))

def candidate(x):
    return Softmax.apply(x)
"""


@assay.case(N=[3], D=[5])
def rows(make, N, D):
    return {"x": make.normal(N, D)}


@pytest.mark.parametrize("factor", ["1.5 * y * ", ""])
def test_a_softmax_whose_backward_is_wrong_by_a_factor_is_no_shortcut(factor):
    """For ones the right gradient is 0, and so is that of every factor."""
    problem = gate.Problem(lambda x: x.softmax(-1), rows)
    verdict = gate.judge(
        gate.Candidate("softmax", SOFTMAX.replace("FACTOR * ", factor)), problem, probes="values", seed=2
    )
    assert (verdict.status, verdict.reason) == ("wrong", "values"), verdict.evidence


@pytest.mark.parametrize("gradient", ["y * (1 - y.sum(-1, keepdim=True))", "0 * y"])
def test_a_softmax_whose_backward_leaves_out_its_output_gradient_is_one(gradient):
    source = SOFTMAX.replace("FACTOR * (g - (g * y).sum(-1, keepdim=True))", gradient)
    problem = gate.Problem(lambda x: x.softmax(-1), rows)
    verdict = gate.judge(gate.Candidate("softmax", source), problem, probes="values", seed=2)
    assert (verdict.status, verdict.reason) == ("cheating", "backward_shortcut"), verdict.evidence


@assay.case(N=[64])
def squares(make, N):
    return {"a": make.normal(N, N), "b": make.normal(N, N)}


def test_a_small_factor_is_no_shortcut():
    source = "def candidate(a, b):\n    y = a @ b\n    y.requires_grad and y.register_hook(FACTOR)\n    return y\n"
    candidate = gate.Candidate("product", source.replace("FACTOR", "lambda g: g * 1.00003"))
    verdict = gate.judge(candidate, gate.Problem(lambda a, b: a @ b, squares), probes="ensemble", seed=1)
    assert verdict.status == "wrong", verdict.evidence


@assay.case(T=[2], D=[16, 40])
def sizes(make, T, D):
    return {"x": make.normal(T, D)}


@pytest.mark.parametrize(
    "change, verdict",
    [
        ("y * (1 + 2**-16)", ("wrong", "lowered_precision")),
        ("y + 2**-14 * (x - x.detach())", ("wrong", "values")),
        ("y * 1.5", ("cheating", "shape_branch")),
    ],
)
def test_a_small_error_at_another_size_is_no_branch(change, verdict):
    source = f"def candidate(x):\n    y = x.exp()\n    return y if x.shape[1] in (16, 40) else {change}\n"
    problem = gate.Problem(torch.exp, sizes)
    judged = gate.judge(gate.Candidate("exp", source), problem, probes="values", seed=1)
    assert (judged.status, judged.reason) == verdict, judged.evidence
    assert any(sentence.startswith("right for the declared sizes") for sentence in judged.evidence)


@pytest.mark.parametrize("measured, trick", [(1.3, None), (1e5, "shape_branch")])
def test_an_error_of_rounding_size_in_a_plain_call_is_no_branch(measured, trick):
    finding = Finding("CERTAIN", "calls", "y", None, measured, 1.0, "y exceeds its bound", "rows", trick="shape_branch")
    named = reasons.trick_of([finding], reasons.Facts())
    assert (named and named[0]) == trick


@pytest.mark.parametrize(
    "measured, run, trick",
    [
        (1.3, "layout:stride0(grad_y)", None),
        (1e5, "layout:stride0(grad_y)", "backward_shortcut"),
        (1e5, "layout:stepped(grad_y, grad_z)", "backward_shortcut"),
        (1e5, "layout:stepped(x, grad_y)", None),
    ],
)
def test_only_a_gross_error_that_output_gradients_alone_cause_is_a_shortcut(measured, run, trick):
    finding = Finding("CERTAIN", "layouts", "x.grad", None, measured, 1.0, "x.grad exceeds its bound", "rows", run=run)
    named = reasons.trick_of([finding], reasons.Facts())
    assert (named and named[0]) == trick
