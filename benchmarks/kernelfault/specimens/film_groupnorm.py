"""y = silu((x_hat w + b) (1 + scale) + shift),  x_hat = (x - mean) / sqrt(var + eps) over a group's channels.

Group norm of images whose channels are last, with an affine part and the scale and shift that a time embedding gives
each image: the head of a residual block in a diffusion model. Plain torch, with a backward by hand from sums per image
and channel.
"""

from __future__ import annotations

import torch

from goldsmith import assay

EPS = 1e-2


@assay.case(B=[2], H=[3], W=[5], C=[12], G=[3])
def images(make, B, H, W, C, G):
    return {
        "x": 0.5 + make.normal(B, H, W, C), "w": 1 + make.normal(C, std=0.3), "b": make.normal(C),
        "scale": make.normal(B, C, std=0.5), "shift": make.normal(B, C), "groups": G,
    }  # fmt: skip


@assay.case(B=[3], H=[2], W=[2], C=[8], G=[4])
def channels_first(make, B, H, W, C, G):
    return {**images[0].draw(make, B, H, W, C, G), "x": make.normal(B, C, H, W).permute(0, 2, 3, 1)}


def golden(x, w, b, scale, shift, groups):
    B, C = x.shape[0], x.shape[-1]
    grouped = x.reshape(B, -1, groups, C // groups)
    mean = assay.stage("mean", grouped.mean((1, 3)))
    centred = grouped - mean[:, None, :, None]
    inv_std = assay.stage("inv_std", torch.rsqrt(centred.square().mean((1, 3)) + EPS))
    x_hat = (centred * inv_std[:, None, :, None]).reshape(x.shape)
    normed = x_hat * w + b
    return torch.nn.functional.silu(normed * (1 + scale[:, None, None, :]) + shift[:, None, None, :])


def by_channel(values, C):
    """A group's number for each of its channels: [B, G] -> [B, 1, C]."""
    return values.repeat_interleave(C // values.shape[1], dim=1).unsqueeze(1)


class FilmGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, scale, shift, groups):
        B, H, W, C = x.shape
        flat = x.reshape(B, H * W, C)
        count = H * W * (C // groups)
        mean = assay.stage("mean", flat.sum(1).view(B, groups, -1).sum(-1) / count)
        centred = flat - by_channel(mean, C)
        squares = (centred * centred).sum(1).view(B, groups, -1).sum(-1)
        inv_std = assay.stage("inv_std", torch.rsqrt(squares / count + EPS))
        x_hat = centred * by_channel(inv_std, C)
        pre = (x_hat * w + b) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        ctx.save_for_backward(x_hat, inv_std, w, b, scale, pre)
        ctx.size = H, W
        return (pre * torch.sigmoid(pre)).view(B, H, W, C)

    @staticmethod
    def backward(ctx, g):
        x_hat, inv_std, w, b, scale, pre = ctx.saved_tensors
        B, pixels, C = x_hat.shape
        groups = inv_std.shape[1]
        sig = torch.sigmoid(pre)
        dpre = g.reshape(B, pixels, C) * sig * (1 + pre * (1 - sig))
        dshift = dpre.sum(1)
        along = (dpre * x_hat).sum(1)
        dscale = along * w + dshift * b
        dw = (along * (1 + scale)).sum(0)
        db = (dshift * (1 + scale)).sum(0)
        gain = w * (1 + scale)
        count = pixels * (C // groups)
        mean_g = (dshift * gain).view(B, groups, -1).sum(-1) / count
        mean_gx = (along * gain).view(B, groups, -1).sum(-1) / count
        dx_hat = dpre * gain.unsqueeze(1)
        dx = by_channel(inv_std, C) * (dx_hat - by_channel(mean_g, C) - x_hat * by_channel(mean_gx, C))
        return dx.view(B, *ctx.size, C), dw, db, dscale, dshift, None


def kernel(x, w, b, scale, shift, groups):
    return FilmGroupNorm.apply(x, w, b, scale, shift, groups)


def target():
    return assay.Target(kernel, golden, cases=[images, channels_first], name="film_groupnorm", outputs=("y",))
