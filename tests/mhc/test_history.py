"""The family's own history: wrong kernels that people wrote, searched for days and repaired. The assay must catch each.

Every one is the right kernel below with one change; the right one passes, so that it is the change that is caught.
"""

import pytest
import torch

from goldsmith import Op, assay

PRE, PRE_BACKWARD = Op.get("mhc.pre"), Op.get("mhc.pre_backward")
CASE = next(case for case in PRE_BACKWARD.cases if case.name == "accumulated")  # n=4, dim=65, gamma is not 1
FORWARD_CASE = next(case for case in PRE.cases if case.name == "three_streams")
MIXES = {"pre": (0, 4), "post": (4, 8), "res": (8, 24)}
PRE_ALONE = {"dalpha": {"pre"}, "dbias": {"pre"}}
SEGMENTS = {"dbias": MIXES, "dalpha": {"pre": (0, 1), "post": (1, 2), "res": (2, 3)}}


def backward_with(fault=None):
    """pre's backward in the shape of the kernels of 2025: one loop over tokens, one program's work in its body."""

    def pre_backward(
        grad_h_in, grad_h_post, grad_logits, x, phi, alpha, inv_rms, h_mix, h_pre, h_post, gamma, grad_x_post,
        pre_eps, post_mult,
    ):  # fmt: skip
        tokens, n, dim = x.shape
        BLOCK_SIZE_K = 32 if fault == "reduction_ends_at_block_size_k" else dim
        a = torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])
        dphi, dgamma = torch.zeros_like(phi), torch.zeros_like(gamma)
        dalpha, dbias = torch.zeros_like(alpha), torch.zeros(n * (n + 2), dtype=alpha.dtype)
        dx = torch.empty_like(x)
        for t in range(tokens):
            vec, r, z = x[t].flatten().to(phi.dtype), inv_rms[t], inv_rms[t] * h_mix[t]
            u = grad_h_in[t].to(phi.dtype)
            dh_pre = (x[t, :, :BLOCK_SIZE_K].to(phi.dtype) * u[:BLOCK_SIZE_K]).sum(-1)
            s = h_pre[t] - pre_eps
            dl_pre, dl_post = dh_pre * s * (1 - s), grad_h_post[t] * h_post[t] * (1 - h_post[t] / post_mult)
            dl = torch.cat([dl_pre, dl_post, grad_logits[t].flatten()])
            bias_rows = dl.clone()
            if fault == "bias_sums_the_scaled_gradient":
                bias_rows[2 * n :] *= alpha[2]
            if fault == "bias_accumulates_in_a_loop_of_n_times_n":
                bias_rows[2 * n :] *= n * n
            dbias += bias_rows
            dalpha += torch.stack([part.sum() for part in (dl * z).split([n, n, n * n])])
            dm = r * a * dl
            weight = gamma.flatten()
            dphi += torch.outer(dm, vec * (1 if fault == "dphi_without_gamma" else weight))
            through = (a * dl if fault == "dgamma_without_inv_rms" else dm) @ phi
            dgamma += (through * vec).reshape(gamma.shape)
            kappa = (a * dl * z).sum() * r.square() / vec.numel()
            whole = dm @ (phi * weight) - kappa * vec + torch.outer(h_pre[t], u).flatten()
            whole = (whole.reshape(n, dim) + grad_x_post[t].to(phi.dtype)).to(x.dtype)
            streams = 1 if fault == "grid_of_one_stream" else n  # grid (tokens, 1) in place of (tokens, n)
            dx[t, :streams] = whole[:streams]
        return dx, dphi, dalpha, dbias, dgamma

    return pre_backward


def backward_target(fault=None):
    return assay.Target(
        backward_with(fault),
        PRE_BACKWARD.reference.forward,
        cases=[CASE],
        name=f"pre_backward, {fault or 'right'}",
        outputs=PRE_BACKWARD.outputs,
        backward=None,
        segments=SEGMENTS,
    )


def forward_with(fault=None):
    def pre(x, phi, alpha, bias, gamma, rms_eps, pre_eps, post_mult, iterations, sinkhorn_eps, form, sinkhorn):
        weight = None if fault == "gamma_missing_in_h_mix" else gamma
        options = dict(rms_eps=rms_eps, pre_eps=pre_eps, post_mult=post_mult, form=form, sinkhorn=sinkhorn)
        options |= dict(iterations=10 if fault == "ten_iterations" else iterations, sinkhorn_eps=sinkhorn_eps)
        return PRE.reference.forward(x, phi, alpha, bias, weight, **options)

    return pre


def forward_target(fault=None):
    return assay.Target(
        forward_with(fault),
        PRE.reference.forward,
        cases=[FORWARD_CASE],
        name=f"pre, {fault or 'right'}",
        outputs=PRE.results,
        saved=PRE.saved,
        backward=None,
    )


def blamed(report):
    """{tensor: segments} of what is found wrong."""
    found = {}
    for finding in report.findings:
        segments = finding.location.segments if finding.location else ()
        found.setdefault(finding.tensor, set()).update(segments)
    return found


def test_the_right_backward_passes():
    assay.check(backward_target())


def test_the_right_forward_passes():
    assay.check(forward_target())


@pytest.mark.parametrize(
    "fault, wrong, segments",
    [
        # 95 % of dalpha_pre missing, and five hypotheses before somebody looked at the block size
        ("reduction_ends_at_block_size_k", {"dalpha", "dbias", "dphi", "dx", "dgamma"}, PRE_ALONE),
        ("bias_sums_the_scaled_gradient", {"dbias"}, {"dbias": {"res"}}),
        ("bias_accumulates_in_a_loop_of_n_times_n", {"dbias"}, {"dbias": {"res"}}),
        ("grid_of_one_stream", {"dx"}, {}),
        ("dgamma_without_inv_rms", {"dgamma"}, {}),
        ("dphi_without_gamma", {"dphi"}, {}),
    ],
)  # fmt: skip
def test_a_wrong_backward_is_caught_and_only_what_is_wrong_is_blamed(fault, wrong, segments):
    report = assay.check(backward_target(fault), raises=False)
    assert report.verdict == "fail"
    found = blamed(report)
    assert set(found) == wrong
    for tensor, names in segments.items():
        assert found[tensor] == names, str(report)


@pytest.mark.parametrize(
    "fault, wrong",
    [
        ("gamma_missing_in_h_mix", {"h_mix", "h_in", "h_post", "h_res"}),  # right for gamma = 1 alone
        ("ten_iterations", {"h_res"}),
    ],
)
def test_a_wrong_forward_is_caught_and_only_what_is_wrong_is_blamed(fault, wrong):
    report = assay.check(forward_target(fault), raises=False)
    assert report.verdict == "fail"
    assert {tensor.removeprefix("saved.") for tensor in blamed(report)} == wrong
