"""The map of structural similarity of two images under a Gaussian window, zeros outside, and its gradient for x.

Two separable passes blur x, y, x^2, y^2 and x y, the second one in tiles of rows. The forward leaves the map's slopes
in the mean, in the variance and in the covariance, the backward blurs them.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE, C1, C2 = 4, 0.01, 0.03
TAPS: dict[tuple, list[float]] = {}


@assay.case(C=[2], H=[7], W=[6])
def images(make, C, H, W):
    return {"x": make.uniform(C, H, W), "y": make.uniform(C, H, W), "radius": 2, "sigma": 1.2}


@assay.case(C=[1], H=[5], W=[11])
def wide(make, C, H, W):
    return {**images[0].draw(make, C, H, W), "sigma": 0.8}


@assay.case(C=[3], H=[9], W=[3])
def small_window(make, C, H, W):
    return {**images[0].draw(make, C, H, W), "radius": 1, "sigma": 0.7}


def golden(x, y, radius, sigma):
    offset = torch.arange(-radius, radius + 1, dtype=x.dtype)
    taps = torch.exp(-offset.square() / (2 * sigma**2))
    taps = taps / taps.sum()

    def band(n):
        apart = torch.arange(n) - torch.arange(n).unsqueeze(1) + radius
        return torch.where((apart >= 0) & (apart <= 2 * radius), taps[apart.clamp(0, 2 * radius)], 0.0)

    def blur(name, image):
        return assay.stage(name, band(x.shape[1]) @ (image @ band(x.shape[2])))

    mu_x, mu_y, xx, yy, xy = blur("mu_x", x), blur("mu_y", y), blur("xx", x * x), blur("yy", y * y), blur("xy", x * y)
    var_x, var_y, cov = xx - mu_x.square(), yy - mu_y.square(), xy - mu_x * mu_y
    luma = (2 * mu_x * mu_y + C1) / (mu_x.square() + mu_y.square() + C1)
    return luma * ((2 * cov + C2) / (var_x + var_y + C2))


def taps_of(radius, sigma):
    """The window's weights, which sum to one; kept, for they are the same in every step of a training."""
    key = (radius, sigma)
    if key not in TAPS:
        taps = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(-radius, radius + 1)]
        TAPS[key] = [tap / sum(taps) for tap in taps]
    return TAPS[key]


def blur(image, taps, out):
    """Blurs rows, then columns in tiles of rows; the window has 2 R + 1 taps and is symmetric."""
    (C, H, W), R = image.shape, len(taps) // 2
    padded = torch.zeros(C, H, W + 2 * R)
    padded[:, :, R : R + W] = image
    across = torch.zeros(C, H + 2 * R, W)
    for k, tap in enumerate(taps):
        across[:, R : R + H] += tap * padded[:, :, k : k + W]
    for top in range(0, H, TILE):
        rows = min(TILE, H - top)
        acc = torch.zeros(C, rows, W)
        for k, tap in enumerate(taps):
            acc += tap * across[:, top + k : top + k + rows]
        out[:, top : top + rows] = acc
    return out


class SSIM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, radius, sigma):
        taps, maps = taps_of(radius, sigma), torch.empty(5, *x.shape)
        mu_x = assay.stage("mu_x", blur(x, taps, maps[0]))
        mu_y = assay.stage("mu_y", blur(y, taps, maps[1]))
        xx = assay.stage("xx", blur(x * x, taps, maps[2]))
        yy = assay.stage("yy", blur(y * y, taps, maps[3]))
        xy = assay.stage("xy", blur(x * y, taps, maps[4]))
        var_x, var_y, cov = xx - mu_x * mu_x, yy - mu_y * mu_y, xy - mu_x * mu_y
        a, b = 2 * mu_x * mu_y + C1, 2 * cov + C2
        c, d = mu_x * mu_x + mu_y * mu_y + C1, var_x + var_y + C2
        ssim = (a / c) * (b / d)
        d_var = -ssim / d
        d_cov = 2 * a / (c * d)
        d_mu = 2 * mu_y * b / (c * d) - 2 * mu_x * ssim / c - 2 * mu_x * d_var - mu_y * d_cov
        ctx.save_for_backward(x, y, d_mu, d_var, d_cov)
        ctx.window = radius, sigma
        return ssim

    @staticmethod
    def backward(ctx, g):
        x, y, d_mu, d_var, d_cov = ctx.saved_tensors
        taps, maps = taps_of(*ctx.window), torch.empty(3, *x.shape)
        dx = blur(g * d_mu, taps, maps[0])
        dx = dx + 2 * x * blur(g * d_var, taps, maps[1])
        return dx + y * blur(g * d_cov, taps, maps[2]), None, None, None


def kernel(x, y, radius, sigma):
    return SSIM.apply(x, y, radius, sigma)


def target():
    return assay.Target(
        kernel, golden, cases=[images, wide, small_window], name="fused_ssim", outputs=("ssim",), grads=("x",)
    )  # fmt: skip
