"""The packed backward of hyper-connections (logits form), every gradient by hand.

h_in = sum_n h_pre[n] x[n],  h_pre = sigmoid(L_pre) + eps,  h_post = 2 sigmoid(L_post),  h_res = L_res
L = a * (h_mix * inv_rms) + bias,  h_mix = (X gamma) phi^T,  inv_rms = rsqrt(mean X^2 + eps),  X = x flattened

The gradient of x has three addends: through the product (x_mm), through inv_rms (x_rms), through h_in (x_in).
"""

from __future__ import annotations

import torch

from goldsmith import assay

EPS = 1e-6


@assay.case(T=[5], n=[4], D=[48])
def tokens(make, T, n, D):
    M = 2 * n + n * n
    return {
        "x": make.normal(T, n, D), "phi": make.normal(M, n * D, std=(n * D) ** -0.5), "alpha": make.normal(3),
        "bias": make.normal(M), "gamma": make.normal(n * D), "n": n,
    }  # fmt: skip


@assay.case(T=[3], n=[2], D=[100])
def two_streams(make, T, n, D):
    return tokens[0].draw(make, T, n, D)


@assay.case(T=[7], n=[4], D=[65])
def odd_dim(make, T, n, D):
    return tokens[0].draw(make, T, n, D)


def by_row(alpha, n):
    """alpha of each row of phi: pre, post, res"""
    return torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])


def golden(x, phi, alpha, bias, gamma, n):
    flat = x.flatten(-2)
    x_mm = assay.stage("x_mm", flat.clone())
    x_rms = assay.stage("x_rms", flat.clone())
    x_in = assay.stage("x_in", x.clone())
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x_rms.square().mean(-1, keepdim=True) + EPS))
    h_mix = assay.stage("h_mix", (x_mm * gamma) @ phi.T)
    logits = assay.stage("logits", by_row(alpha, n) * (h_mix * inv_rms) + bias)
    h_pre = assay.stage("h_pre", torch.sigmoid(logits[:, :n]) + EPS)
    h_in = (h_pre.unsqueeze(-1) * x_in).sum(-2)
    return h_in, 2 * torch.sigmoid(logits[:, n : 2 * n]), logits[:, 2 * n :].unflatten(-1, (n, n)), inv_rms, h_mix


def forward(x, phi, alpha, bias, gamma, n):
    X = x.flatten(-2)
    inv_rms = assay.stage("inv_rms", torch.rsqrt(torch.sum(X * X, -1, keepdim=True) / X.shape[-1] + EPS))
    h_mix = assay.stage("h_mix", torch.matmul(X * gamma, phi.mT))
    logits = assay.stage("logits", torch.addcmul(bias, by_row(alpha, n), h_mix * inv_rms))
    pre, post, res = logits.split([n, n, n * n], -1)
    h_pre = assay.stage("h_pre", pre.sigmoid() + EPS)
    h_in = torch.einsum("tn,tnd->td", h_pre, x)
    return h_in, 2 * post.sigmoid(), res.unflatten(-1, (n, n)).clone(), inv_rms.clone(), h_mix.clone()


def backward(x, phi, alpha, bias, gamma, n, inv_rms, h_mix, grad_h_in, grad_h_post, grad_h_res):
    T, _, D = x.shape
    X = x.reshape(T, n * D)
    a = by_row(alpha, n)
    normed = h_mix * inv_rms
    sig = (a * normed + bias)[:, : 2 * n].sigmoid()
    slope = sig * (1 - sig)

    dh_pre = torch.zeros(T, n)
    for k in range(0, D, 32):
        dh_pre += (x[:, :, k : k + 32] * grad_h_in[:, None, k : k + 32]).sum(-1)
    dh_pre = assay.stage("h_pre.grad", dh_pre)
    dh_res = grad_h_res.reshape(T, n * n)
    dlogits = torch.cat([dh_pre * slope[:, :n], 2 * grad_h_post * slope[:, n:], dh_res], 1)
    dlogits = assay.stage("logits.grad", dlogits)

    dbias = torch.zeros(2 * n + n * n)
    dbias[: 2 * n] += dlogits[:, : 2 * n].sum(0)
    dbias[2 * n :] += dlogits[:, 2 * n :].sum(0)
    rows = (dlogits * normed).sum(0)
    dalpha = torch.stack([rows[:n].sum(), rows[n : 2 * n].sum(), rows[2 * n :].sum()])

    dnormed = dlogits * a
    dh_mix = assay.stage("h_mix.grad", dnormed * inv_rms)
    dinv_rms = assay.stage("inv_rms.grad", (dnormed * h_mix).sum(-1, keepdim=True))
    dxg = dh_mix @ phi
    dphi = dh_mix.T @ (X * gamma)
    dgamma = (dxg * X).sum(0)

    dx_mm = assay.stage("x_mm.grad", dxg * gamma)
    dx_rms = assay.stage("x_rms.grad", -dinv_rms * inv_rms**3 * X / (n * D))
    h_pre = sig[:, :n] + EPS
    dx_in = assay.stage("x_in.grad", h_pre.unsqueeze(-1) * grad_h_in.unsqueeze(1))
    dx = torch.empty(T, n, D)
    for stream in range(n):
        part = slice(stream * D, (stream + 1) * D)
        dx[:, stream] = dx_mm[:, part] + dx_rms[:, part] + dx_in[:, stream]
    return {"x": dx, "phi": dphi, "alpha": dalpha, "bias": dbias, "gamma": dgamma}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, two_streams, odd_dim], name="mhc_backward",
        outputs=("h_in", "h_post", "h_res", "inv_rms", "h_mix"), saved=("inv_rms", "h_mix"), backward=backward,
        segments={"bias.grad": lambda n: {"pre": (0, n), "post": (n, 2 * n), "res": (2 * n, 2 * n + n * n)}},
    )  # fmt: skip
