"""y = w a / rms(a) in groups of channels,  a = x silu(z): the gated norm of a state space model, backward by hand.

Programs take ROWS rows each. Their shares of w's gradient go to SLOTS rows of a workspace, which are summed at the end.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from goldsmith import assay

ROWS, SLOTS = 3, 2


@assay.case(T=[14], G=[3], C=[8])
def tokens(make, T, G, C):
    return {
        "x": make.normal(T, G * C), "z": make.normal(T, G * C), "w": make.normal(G * C), "groups": G, "eps": 1e-5,
    }  # fmt: skip


@assay.case(T=[7], G=[2], C=[5])
def narrow(make, T, G, C):
    return tokens[0].draw(make, T, G, C)


def golden(x, z, w, groups, eps):
    a = (x * F.silu(z)).unflatten(-1, (groups, -1))
    normed = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * w


class GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, w, groups, eps):
        T, D = x.shape
        C = D // groups
        y, rstd = torch.empty(T, D), torch.empty(T, groups)
        for at in range(0, T, ROWS):
            rows = slice(at, min(at + ROWS, T))
            for g in range(groups):
                cols = slice(g * C, g * C + C)
                a = x[rows, cols] * z[rows, cols] * torch.sigmoid(z[rows, cols])
                r = torch.rsqrt((a * a).sum(1) / C + eps)
                rstd[rows, g] = r
                y[rows, cols] = a * r.unsqueeze(1) * w[cols]
        ctx.save_for_backward(x, z, w, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, z, w, rstd = ctx.saved_tensors
        T, groups = rstd.shape
        C = x.shape[1] // groups
        dx, dz, shares = torch.empty(x.shape), torch.empty(z.shape), torch.zeros(SLOTS, x.shape[1])
        for program in range((T + ROWS - 1) // ROWS):
            rows = slice(program * ROWS, min(program * ROWS + ROWS, T))
            slot = program % SLOTS
            for g in range(groups):
                cols = slice(g * C, g * C + C)
                xb, zb, r = x[rows, cols], z[rows, cols], rstd[rows, g].unsqueeze(1)
                gate = torch.sigmoid(zb)
                x_hat = xb * zb * gate * r
                gw = dy[rows, cols] * w[cols]
                inner = (gw * x_hat).sum(1, keepdim=True) / C
                da = r * (gw - x_hat * inner)
                dx[rows, cols] = da * zb * gate
                dz[rows, cols] = da * xb * gate * (1 + zb * (1 - gate))
                shares[slot, cols] += (dy[rows, cols] * x_hat).sum(0)
        return dx, dz, shares.sum(0), None, None


def kernel(x, z, w, groups, eps):
    return GatedNorm.apply(x, z, w, groups, eps)


def target():
    return assay.Target(kernel, golden, cases=[tokens, narrow], name="gated_rmsnorm")
