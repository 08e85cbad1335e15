"""RMSNorm with a gate, with a backward of its own, in torch. A wrong name puts the gate's gradient in the place of x's.

After https://github.com/fla-org/flash-linear-attention/issues/155 (HanGuo97, 2025).
"""

import torch

from goldsmith import assay


class GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, z, eps):
        ctx.shape = x.shape
        x, z = x.reshape(-1, x.shape[-1]), z.reshape(-1, z.shape[-1])
        inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        y = x * inv_rms * w * z * z.sigmoid()
        ctx.save_for_backward(x, w, z, inv_rms)
        return y.reshape(ctx.shape)

    @staticmethod
    def backward(ctx, dy):
        x, w, z, inv_rms = ctx.saved_tensors
        dy = dy.reshape(x.shape)
        x_hat, sigmoid = x * inv_rms, z.sigmoid()
        dx_hat = dy * w * z * sigmoid
        dx = inv_rms * (dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdim=True))
        dz = dy * x_hat * w * sigmoid * (1 + z * (1 - sigmoid))
        dw = (dy * x_hat * z * sigmoid).sum(0)
        dx = dx.reshape(ctx.shape)
        dx = dz.reshape(ctx.shape)
        return dx, dw, dz, None


def golden(x, w, z, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return x * inv_rms * w * torch.nn.functional.silu(z)


@assay.case(T=[5], D=[8])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "z": make.normal(T, D), "eps": 1e-6}


@assay.case(B=[2], T=[3], D=[4])
def batch(make, B, T, D):
    return {"x": make.normal(B, T, D), "w": make.normal(D), "z": make.normal(B, T, D), "eps": 1e-6}


target = assay.Target(GatedNorm.apply, golden, cases=[rows, batch], name="gated_norm")
