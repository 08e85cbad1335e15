"""Past bugs of this family, which took people days to find. The assay must catch each.

Each wrong kernel is the correct kernel below with one change. The correct one passes, so the assay catches the change.
"""

import pytest
import torch

from goldsmith import Op, assay
from goldsmith.assay.declare.case import Case
from goldsmith.mhc._cases import DERIVATIVE_SEGMENTS
from goldsmith.mhc.pre_gradient_formula.cases import gradients
from mhc.wrong import check, spread, wrong_segments

PRE_BACKWARD = Op.get("mhc.pre_backward")
CASE = Case("history", gradients, {"T": 5, "n": 4, "dim": 65, "accumulate": True})  # gamma is not 1


def backward_with(fault=None):
    """pre's backward in the style of the kernels of 2025: a loop over tokens, with one program's work as its body."""
    kept = {}

    def pre_backward(
        grad_h_in, grad_h_post, grad_logits, x, phi, alpha, inv_rms, h_mix, h_pre, h_post, gamma, grad_x_post,
        pre_eps, post_mult,
    ):  # fmt: skip
        tokens, n, dim = x.shape
        BLOCK_SIZE_K = 32 if fault == "reduction_ends_at_block_size_k" else dim
        a, weight = spread(alpha, n), gamma.flatten()
        dphi, dgamma = torch.zeros_like(phi), torch.zeros_like(gamma)
        dalpha, dbias = torch.zeros_like(alpha), torch.zeros(n * (n + 2), dtype=alpha.dtype)
        dx = grad_x_post.clone()
        if fault == "dx_goes_on_from_the_call_before":
            dx = kept.setdefault("dx", dx)
        for t in range(tokens):
            vec, r, z = x[t].flatten().to(phi.dtype), inv_rms[t], inv_rms[t] * h_mix[t]
            u = grad_h_in[t].to(phi.dtype)
            dh_pre = (x[t, :, :BLOCK_SIZE_K].to(phi.dtype) * u[:BLOCK_SIZE_K]).sum(-1)
            s = h_pre[t] - pre_eps
            dl_pre, dl_post = dh_pre * s * (1 - s), grad_h_post[t] * h_post[t] * (1 - h_post[t] / post_mult)
            dl = torch.cat([dl_pre, dl_post, grad_logits[t].flatten()])
            bias_rows = dl.clone()
            if fault in ("bias_sums_the_scaled_gradient", "bias_sums_it_n_times_n_times"):
                bias_rows[2 * n :] *= alpha[2]
            if fault in ("bias_accumulates_in_a_loop_of_n_times_n", "bias_sums_it_n_times_n_times"):
                bias_rows[2 * n :] *= n * n
            dbias += bias_rows
            dalpha += torch.stack([part.sum() for part in (dl * z).split([n, n, n * n])])
            dm = r * a * dl
            dphi += torch.outer(dm, vec * (1 if fault == "dphi_without_gamma" else weight))
            through = (a * dl if fault == "dgamma_without_inv_rms" else dm) @ phi
            dgamma += (through * vec).reshape(gamma.shape)
            kappa = (a * dl * z).sum() * r.square() / vec.numel()
            if fault == "kappa_missing":
                kappa = 0.0
            if fault == "r_squared_for_r_cubed":
                kappa = kappa / r
            back = phi if fault == "dx_without_gamma" else phi * weight
            if fault == "phi_transposed":
                back = phi.reshape(phi.mT.shape).mT * weight
            whole = dm @ back - kappa * vec + torch.outer(h_pre[t], u).flatten()
            streams = 1 if fault == "grid_of_one_stream" else n  # grid (tokens, 1) in place of (tokens, n)
            dx[t, :streams] += whole.reshape(n, dim)[:streams].to(x.dtype)
        return dx.clone(), dphi, dalpha, dbias, dgamma

    return pre_backward


def backward_target(fault=None):
    return assay.Target(
        backward_with(fault),
        PRE_BACKWARD.reference.forward,
        cases=[CASE],
        name=f"pre_backward, {fault or 'right'}",
        outputs=PRE_BACKWARD.outputs,
        backward=None,
        segments=DERIVATIVE_SEGMENTS,
    )


def test_the_right_backward_passes():
    check(backward_target())


@pytest.mark.parametrize(
    "fault, wrong",
    [
        # 95 % of dalpha_pre was missing; five guesses were tested before somebody looked at the block size
        (
            "reduction_ends_at_block_size_k",
            {"dalpha": {"pre"}, "dbias": {"pre"}, "dphi": {"pre"}, "dx": set(), "dgamma": set()},
        ),
        ("bias_sums_the_scaled_gradient", {"dbias": {"res"}}),
        ("bias_accumulates_in_a_loop_of_n_times_n", {"dbias": {"res"}}),
        ("bias_sums_it_n_times_n_times", {"dbias": {"res"}}),
        ("dphi_without_gamma", {"dphi": set()}),
        ("dgamma_without_inv_rms", {"dgamma": set()}),
        ("kappa_missing", {"dx": set()}),
        ("r_squared_for_r_cubed", {"dx": set()}),
        ("dx_without_gamma", {"dx": set()}),
        ("phi_transposed", {"dx": set()}),
        ("grid_of_one_stream", {"dx": set()}),
        ("dx_goes_on_from_the_call_before", {"dx": set()}),
    ],
)
def test_a_wrong_backward_is_caught_and_only_wrong_tensors_are_blamed(fault, wrong):
    assert wrong_segments(backward_target(fault)) == wrong


def test_streams_that_were_never_written_are_reported():
    report = check(backward_target("grid_of_one_stream"), raises=False)
    (where,) = {f.location.text for f in report.findings if f.tensor == "dx"}
    assert where.startswith("axis n: 1..3"), str(report)
