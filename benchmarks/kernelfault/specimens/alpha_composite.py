"""rgb = sum_i trans_i (1 - exp(-sigma_i delta_i)) colour_i + trans_end background: samples along rays, front to back.

Rays are packed one behind another. Optical depths are summed along a ray, and the backward goes from its last sample to
the first with what lies behind.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(R=[4], N=[17])
def rays(make, R, N):
    return {
        "sigma": make.uniform(N), "delta": make.uniform(N), "colour": make.uniform(N, 3), "background": make.uniform(3),
        "start": make.offsets(R, N),
    }  # fmt: skip


@assay.case(R=[2], N=[9])
def few(make, R, N):
    return rays[0].draw(make, R, N)


def golden(sigma, delta, colour, background, start):
    depth, rgb, opacity, trans = sigma * delta, [], [], []
    for r in range(len(start) - 1):
        mine = depth[start[r] : start[r + 1]]
        behind = torch.exp(-torch.cat([mine.new_zeros(1), mine.cumsum(0)]))
        weight = behind[:-1] * -torch.expm1(-mine)
        rgb.append((weight.unsqueeze(1) * colour[start[r] : start[r + 1]]).sum(0) + behind[-1] * background)
        opacity.append(1 - behind[-1])
        trans.append(behind[:-1])
    return torch.stack(rgb), torch.stack(opacity), torch.cat(trans)


def forward(sigma, delta, colour, background, start):
    R, N = len(start) - 1, len(sigma)
    rgb, opacity, trans = torch.empty(R, 3), torch.empty(R), torch.empty(N)
    for r in range(R):
        depth, seen = torch.zeros(()), torch.zeros(3)
        for i in range(int(start[r]), int(start[r + 1])):
            trans[i] = torch.exp(-depth)
            alpha = -torch.expm1(-sigma[i] * delta[i])
            seen = seen + trans[i] * alpha * colour[i]
            depth = depth + sigma[i] * delta[i]
        rgb[r] = seen + torch.exp(-depth) * background
        opacity[r] = 1 - torch.exp(-depth)
    return rgb, opacity, trans


def backward(sigma, delta, colour, background, start, rgb, opacity, trans, grad_rgb, grad_opacity):
    N = len(sigma)
    dsigma, ddelta, dcolour = torch.empty(N), torch.empty(N), torch.empty(N, 3)
    dbackground = torch.zeros(3)
    for r in range(len(start) - 1):
        g, first, last = grad_rgb[r], int(start[r]), int(start[r + 1])
        left = 1 - opacity[r]
        dbackground += left * g
        behind = left * background
        for i in reversed(range(first, last)):
            alpha = -torch.expm1(-sigma[i] * delta[i])
            through = trans[i] * (1 - alpha)
            ddepth = (g * (through * colour[i] - behind)).sum() + grad_opacity[r] * left
            dcolour[i] = trans[i] * alpha * g
            behind = behind + trans[i] * alpha * colour[i]
            dsigma[i] = ddepth * delta[i]
            ddelta[i] = ddepth * sigma[i]
    return {"sigma": dsigma, "delta": ddelta, "colour": dcolour, "background": dbackground}


def target():
    return assay.Target(
        forward, golden, cases=[rays, few], name="alpha_composite", outputs=("rgb", "opacity", "trans"),
        saved=("trans",), backward=backward,
    )  # fmt: skip
