"""y = sigmoid(z G_o) (LN(sum_k a[i, k] b[j, k]) w W_o), a = mask sigmoid(z G_a) (z W_a), b alike: triangles of pairs.

AlphaFold's triangle multiplication with outgoing edges, over blocks of k in the forward and of i or j in the backward,
which forms projections and gates again.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK, EPS = 4, 1e-5


@assay.case(N=[6], C=[4], H=[3])
def pairs(make, N, C, H):
    here = torch.ones(N)
    here[N // 2] = 0
    return {
        "z": make.normal(N, N, C), "mask": here.unsqueeze(1) * here, "w_a": make.normal(C, H), "g_a": make.normal(C, H),
        "w_b": make.normal(C, H), "g_b": make.normal(C, H), "w": 1 + 0.3 * make.normal(H), "w_o": make.normal(H, C),
        "g_o": make.normal(C, C),
    }  # fmt: skip


@assay.case(N=[5], C=[3], H=[5])
def few(make, N, C, H):
    return pairs[0].draw(make, N, C, H)


@assay.case(N=[7], C=[2], H=[4])
def thin(make, N, C, H):
    return pairs[0].draw(make, N, C, H)


def golden(z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o):
    m = mask.unsqueeze(2)
    a = assay.stage("a", m * torch.sigmoid(z @ g_a) * (z @ w_a))
    b = assay.stage("b", m * torch.sigmoid(z @ g_b) * (z @ w_b))
    x = assay.stage("x", (a.unsqueeze(1) * b.unsqueeze(0)).sum(2))
    centred = x - x.mean(2, keepdim=True)
    x_hat = assay.stage("x_hat", centred * torch.rsqrt(centred.square().mean(2, keepdim=True) + EPS))
    return torch.sigmoid(z @ g_o) * ((x_hat * w) @ w_o)


def blocks(N):
    return [slice(at, min(at + BLOCK, N)) for at in range(0, N, BLOCK)]


def gated_backward(z, m, weight, gate, d):
    """Gradients of weight, gate and z through m sigmoid(z gate) (z weight)."""
    s = torch.sigmoid(z @ gate)
    dlinear = d * m * s
    dgate = d * m * (z @ weight) * s * (1 - s)
    flat = z.flatten(0, 1).mT
    return flat @ dlinear.flatten(0, 1), flat @ dgate.flatten(0, 1), dlinear @ weight.mT + dgate @ gate.mT


class Triangle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o):
        N, H = len(z), len(w)
        m = mask.unsqueeze(2)
        a = assay.stage("a", m * torch.sigmoid(z @ g_a) * (z @ w_a))
        b = assay.stage("b", m * torch.sigmoid(z @ g_b) * (z @ w_b))
        x = torch.zeros(N, N, H)
        for k in blocks(N):
            x += torch.einsum("ikh,jkh->ijh", a[:, k], b[:, k])
        x = assay.stage("x", x)
        centred = x - x.mean(2, keepdim=True)
        inv = torch.rsqrt((centred * centred).mean(2, keepdim=True) + EPS)
        x_hat = assay.stage("x_hat", centred * inv)
        gate = torch.sigmoid(z @ g_o)
        ctx.save_for_backward(z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o, a, b, x_hat, inv)
        return gate * ((x_hat * w) @ w_o)

    @staticmethod
    def backward(ctx, g):
        z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o, a, b, x_hat, inv = ctx.saved_tensors
        N, m = len(z), mask.unsqueeze(2)
        gate, scaled = torch.sigmoid(z @ g_o), x_hat * w
        dgate = g * (scaled @ w_o) * gate * (1 - gate)
        dout = g * gate
        dg_o = z.flatten(0, 1).mT @ dgate.flatten(0, 1)
        dw_o = scaled.flatten(0, 1).mT @ dout.flatten(0, 1)
        dscaled = dout @ w_o.mT
        dw = (dscaled * x_hat).sum((0, 1))
        dx_hat = dscaled * w
        mean, slope = dx_hat.mean(2, keepdim=True), (dx_hat * x_hat).mean(2, keepdim=True)
        dx = assay.stage("x.grad", inv * (dx_hat - mean - x_hat * slope))
        da, db = torch.zeros(a.shape), torch.zeros(b.shape)
        for part in blocks(N):
            da += torch.einsum("ijh,jkh->ikh", dx[:, part], b[part])
            db += torch.einsum("ijh,ikh->jkh", dx[part], a[part])
        da, db = assay.stage("a.grad", da), assay.stage("b.grad", db)
        dw_a, dg_a, dz_a = gated_backward(z, m, w_a, g_a, da)
        dw_b, dg_b, dz_b = gated_backward(z, m, w_b, g_b, db)
        return dgate @ g_o.mT + dz_a + dz_b, None, dw_a, dg_a, dw_b, dg_b, dw, dw_o, dg_o


def kernel(z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o):
    return Triangle.apply(z, mask, w_a, g_a, w_b, g_b, w, w_o, g_o)


def target():
    return assay.Target(
        kernel, golden, cases=[pairs, few, thin], name="triangle_mult", outputs=("y",),
        grads=("z", "w_a", "g_a", "w_b", "g_b", "w", "w_o", "g_o"),
    )  # fmt: skip
