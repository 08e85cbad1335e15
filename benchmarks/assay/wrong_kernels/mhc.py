"""The packed backward of hyper-connections (logits form), with mistakes that were made in its history.

h_in = sum_n h_pre[n] x[n],  h_pre = sigmoid(L_pre) + eps,  h_post = 2 sigmoid(L_post),  h_res = L_res
L = alpha * inv_rms * (X gamma) phi^T + bias,  inv_rms = rsqrt(mean X^2 + eps),  X = x with streams and dim flattened
"""

from __future__ import annotations

import torch

from goldsmith import assay

from .registry import wrong

EPS = 1e-6


@assay.case(T=[5], n=[4], D=[48])
def tokens(make, T, n, D):
    M = 2 * n + n * n
    return {
        "x": make.normal(T, n, D), "phi": make.normal(M, n * D, std=(n * D) ** -0.5), "alpha": make.normal(3),
        "bias": make.normal(M), "gamma": make.normal(n * D),
    }  # fmt: skip


def spread(alpha, n):
    """alpha per row of phi: pre, post, res"""
    return torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])


def golden(x, phi, alpha, bias, gamma):
    n = x.shape[-2]
    flat = x.flatten(-2)
    inv_rms = assay.stage("inv_rms", torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS))
    h_mix = assay.stage("h_mix", (flat * gamma) @ phi.T)
    logits = assay.stage("logits", spread(alpha, n) * (h_mix * inv_rms) + bias)
    h_pre = assay.stage("h_pre", torch.sigmoid(logits[:, :n]) + EPS)
    h_in = (h_pre.unsqueeze(-1) * x).sum(-2)
    return h_in, 2 * torch.sigmoid(logits[:, n : 2 * n]), logits[:, 2 * n :].unflatten(-1, (n, n))


def forward(x, phi, alpha, bias, gamma):
    with torch.no_grad():
        return golden(x, phi, alpha, bias, gamma)


def backward(fault: str = ""):
    """The explicit backward, with one mistake (or none)."""

    def packed(x, phi, alpha, bias, gamma, grad_h_in, grad_h_post, grad_h_res):
        T, n, D = x.shape
        X = x.flatten(-2)
        inv_rms = torch.rsqrt(X.square().mean(-1, keepdim=True) + EPS)
        h_mix = (X * gamma) @ phi.T
        a = spread(alpha, n)
        sig = torch.sigmoid(a * (h_mix * inv_rms) + bias)[:, : 2 * n]
        block = 32 if fault == "block_k" else D
        dh_pre = (x[..., :block] * grad_h_in[:, None, :block]).sum(-1)
        slope = sig * (1 - sig)
        dh_res = grad_h_res.flatten(1)
        dL = torch.cat([dh_pre * slope[:, :n], 2 * grad_h_post * slope[:, n:], dh_res], 1)
        dbias = dL.sum(0)
        if fault == "wrong_variable":
            dbias[2 * n :] = (alpha[2] * dh_res).sum(0)
        if fault == "accumulated":
            dbias[2 * n :] *= n * n
        per_row = (dL * h_mix * inv_rms).sum(0)
        dalpha = torch.stack([per_row[:n].sum(), per_row[n : 2 * n].sum(), per_row[2 * n :].sum()])
        dm = dL * a
        dinv = (dm * h_mix).sum(-1, keepdim=True)
        dh_mix = dm * inv_rms
        dXg = dh_mix @ phi
        dgamma = ((dm @ phi if fault == "no_inv_rms" else dXg) * X).sum(0)
        dX = dXg * gamma - dinv * inv_rms**3 * X / (n * D)
        if fault == "no_rms_path":
            dX = dXg * gamma
        if fault == "sign":
            dX = dXg * gamma + dinv * inv_rms**3 * X / (n * D)
        pre = sig[:, :n] + EPS
        dx = torch.empty_like(x) if fault == "one_stream" else x if fault == "into_x" else torch.zeros_like(x)
        streams = 1 if fault == "one_stream" else n
        full = dX.unflatten(-1, (n, D)) + pre.unsqueeze(-1) * grad_h_in.unsqueeze(1)
        dx[:, :streams] = full[:, :streams]
        if fault == "not_computed":
            dgamma = torch.zeros_like(gamma)
        grads = {"x": dx, "phi": dh_mix.T @ (X * gamma), "alpha": dalpha, "bias": dbias, "gamma": dgamma}
        if fault == "missing_addend":
            grads["x"] = dX.unflatten(-1, (n, D))
        return grads

    return packed


def target(fault: str) -> assay.Target:
    segments = {"pre": (0, 4), "post": (4, 8), "res": (8, 24)}
    return assay.Target(
        forward, golden, cases=tokens, name=f"mhc_backward_{fault or 'right'}", outputs=("h_in", "h_post", "h_res"),
        backward=backward(fault), segments={"bias.grad": segments},
    )  # fmt: skip


@wrong("M00", "mhc", "the packed backward as it should be", right=True)
def _right():
    return target("")


for _id, _fault, _what in (
    ("M04", "block_k", "dh_pre sums the first BLOCK_K = 32 of D"),
    ("M05", "wrong_variable", "dbias of the residual part sums a_res * dh_res"),
    ("M06", "accumulated", "dbias of the residual part is accumulated n*n times"),
    ("M07", "no_inv_rms", "dgamma lacks inv_rms"),
    ("M08", "one_stream", "dx is written for one stream only"),
    ("M10", "into_x", "dx is stored into x"),
    ("M16", "not_computed", "dgamma is never computed"),
    ("M18", "missing_addend", "dx lacks the path through h_in"),
    ("G08", "sign", "the rms path of dx has the other sign"),
    ("W01", "no_rms_path", "dx lacks the rms path"),
):
    wrong(_id, "mhc", _what)(lambda fault=_fault: target(fault))
