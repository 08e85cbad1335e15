"""Kernels that compute a different model than declared: another Sinkhorn, another weight layout, another matrix.

Each candidate is the reference with one change. The unchanged references pass in tests/test_every_op.py.
"""

import pytest
import torch

from goldsmith import Op, assay
from goldsmith.assay.declare.case import Case
from goldsmith.mhc._cases import DERIVATIVE_SEGMENTS, SEGMENTS, post_inputs, pre_inputs
from goldsmith.mhc.sinkhorn.cases import matrices
from mhc.wrong import check, through_fixed_point, wrong_segments

PRE, POST, SINKHORN = Op.get("mhc.pre"), Op.get("mhc.post"), Op.get("mhc.sinkhorn")
WEIGHTS_CASE = Case("history", pre_inputs, {"T": 3, "n": 4, "dim": 33, "std": 3.0})  # gamma is not 1
COEFFICIENTS = {"h_in": set(), "h_post": set(), "h_res": set()}


def innermost(phi, x):
    """phi with TransformerEngine's order of columns, dim * n + stream, used as ours."""
    return phi.unflatten(-1, x.shape[-2:]).mT.flatten(-2)


def tf32(phi):
    """phi with the ten bits of mantissa that a tensor core keeps of a float32 operand."""
    return ((phi.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


WEIGHTS = {
    "gamma_missing_in_h_mix": lambda inputs: {"gamma": None},  # correct only for gamma = 1
    "phi_transposed": lambda inputs: {"phi": inputs["phi"].reshape(inputs["phi"].mT.shape).mT},
    "phi_in_transformer_engines_order": lambda inputs: {"phi": innermost(inputs["phi"], inputs["x"])},
    "phi_in_tf32": lambda inputs: {"phi": tf32(inputs["phi"])},
    "ten_iterations": lambda inputs: {"iterations": 10},
    "megatrons_sinkhorn": lambda inputs: {"form": "megatron"},
    "right": lambda inputs: {},
}


def pre_with(fault):
    def pre(x, phi, alpha, bias, gamma, rms_eps, pre_eps, post_mult, iterations, sinkhorn_eps, form, sinkhorn):
        arguments = dict(locals())
        del arguments["fault"]
        return PRE.reference.forward(**(arguments | WEIGHTS[fault](arguments)))

    return assay.Target(
        pre,
        PRE.reference.forward,
        cases=[WEIGHTS_CASE],
        name=f"pre, {fault}",
        outputs=PRE.results,
        saved=PRE.saved,
        backward=None,
        segments={name: named for name, named in SEGMENTS.items() if name not in DERIVATIVE_SEGMENTS},
    )


def test_the_unchanged_weights_pass():
    check(pre_with("right"))


@pytest.mark.parametrize(
    "fault, wrong",
    [
        ("gamma_missing_in_h_mix", {"h_mix": set(), **COEFFICIENTS}),
        ("phi_transposed", {"h_mix": set(), **COEFFICIENTS}),
        ("phi_in_transformer_engines_order", {"h_mix": set(), **COEFFICIENTS}),
        ("phi_in_tf32", {"h_mix": set(), **COEFFICIENTS}),
        ("ten_iterations", {"h_res": set()}),
        ("megatrons_sinkhorn", {"h_res": set()}),
    ],
)
def test_weights_and_steps_of_another_model_are_caught_and_only_wrong_tensors_are_blamed(fault, wrong):
    assert wrong_segments(pre_with(fault)) == wrong


def test_h_res_transposed_is_caught():
    def post(x, f, h_post, h_res, orientation):
        return POST.reference.forward(x, f, h_post, h_res, orientation="out_in")[0]

    case = Case("history", post_inputs, {"T": 3, "n": 4, "dim": 9})
    target = assay.Target(post, POST.reference.forward, cases=[case], outputs=("x_next",))
    assert wrong_segments(target) == {"x_next": set(), "x.grad": set(), "h_res.grad": set()}


# -- gradients of Sinkhorn ---------------------------------------------------------------------------------------------


def fixed_point(logits, h_res, grad_h_res, iterations, eps, form):
    return through_fixed_point(h_res.double(), grad_h_res.double()).to(logits.dtype)


def last_matrix_for_all(logits, h_res, grad_h_res, iterations, eps, form):
    """Differentiates every half-step at the final P, so that none has to be rebuilt."""
    g = grad_h_res
    for axis in [-2, *[-1, -2] * (iterations - 1)]:
        g = g - (g * h_res).sum(axis, keepdim=True)
    s = torch.softmax(logits, -1)
    return s * (g - (g * s).sum(-1, keepdim=True))


def of_the_steps(logits, h_res, grad_h_res, iterations, eps, form):
    return SINKHORN.reference.gradient(grad_h_res, logits, iterations=iterations, eps=eps, form=form)


def sinkhorn_with(backward, **sizes):
    return assay.Target(
        SINKHORN.reference.forward,
        SINKHORN.reference.forward,
        cases=[Case("history", matrices, {"T": 3, "n": 4, **sizes})],
        outputs=("h_res",),
        backward=backward,
        golden_backward=lambda **inputs: {"logits": of_the_steps(**inputs)},
    )


NEAR_IDENTITY = {"std": 0.5, "diagonal": 8.0}


def test_the_gradient_of_the_steps_passes():
    check(sinkhorn_with(of_the_steps, **NEAR_IDENTITY))


@pytest.mark.parametrize("backward", [fixed_point, last_matrix_for_all])
@pytest.mark.parametrize("sizes", [NEAR_IDENTITY, {"std": 6.0}], ids=["near_identity", "large_logits"])
def test_shortcuts_through_sinkhorn_are_caught(backward, sizes):
    assert wrong_segments(sinkhorn_with(backward, **sizes)) == {"logits.grad": set()}
