"""y[n] = sum over the eight voxels around point n of prod_d weight_d volume[:, z, y, x]: trilinear sampling.

Points are in voxels, (x, y, z); outside of the volume there are zeros. Programs go over blocks of points; the backward
scatters into the volume and differentiates the weights by the points.
"""

from __future__ import annotations

import itertools

import torch

from goldsmith import assay

BLOCK = 8
CORNERS = list(itertools.product((0, 1), repeat=3))


@assay.case(N=[13], C=[3], Z=[4], Y=[3], X=[5])
def points(make, N, C, Z, Y, X):
    return {
        "volume": make.normal(C, Z, Y, X), "points": make.uniform(N, 3) * torch.tensor([X + 1.0, Y + 1.0, Z + 1.0]) - 1,
    }  # fmt: skip


@assay.case(N=[9], C=[1], Z=[2], Y=[6], X=[3])
def flat(make, N, C, Z, Y, X):
    return points[0].draw(make, N, C, Z, Y, X)


def golden(volume, points):
    size = torch.tensor(volume.shape[:0:-1])
    base = torch.floor(points)
    f = points - base
    y = 0
    for corner in CORNERS:
        at = base + torch.tensor(corner)
        inside = ((at >= 0) & (at < size)).all(-1, keepdim=True)
        x, j, i = torch.where(inside, at, 0).long().unbind(-1)
        weight = torch.where(torch.tensor(corner, dtype=torch.bool), f, 1 - f).prod(-1, keepdim=True)
        y = y + weight * inside * volume[:, i, j, x].mT
    return y


def around(part, shape):
    """Fractions of points, and for each corner its voxels' places in memory and whether they are inside."""
    Z, Y, X = shape
    base = torch.floor(part)
    f = part - base
    found = []
    for dx, dy, dz in CORNERS:
        x, y, z = base[:, 0] + dx, base[:, 1] + dy, base[:, 2] + dz
        inside = (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z)
        place = (z * Y + y) * X + x
        found.append((torch.where(inside, place, 0).long(), inside.float()))
    return f, found


def factors(f, corner):
    return [f[:, d] if up else 1 - f[:, d] for d, up in enumerate(corner)]


class Trilinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, volume, points):
        C, N = volume.shape[0], len(points)
        dense = volume.reshape(C, -1)
        y = torch.empty(N, C)
        for at in range(0, N, BLOCK):
            part = slice(at, min(at + BLOCK, N))
            f, found = around(points[part], volume.shape[1:])
            acc = torch.zeros(part.stop - at, C)
            for corner, (place, inside) in zip(CORNERS, found, strict=True):
                wx, wy, wz = factors(f, corner)
                acc += (wx * wy * wz * inside).unsqueeze(1) * dense[:, place].mT
            y[part] = acc
        ctx.save_for_backward(volume, points)
        return y

    @staticmethod
    def backward(ctx, gy):
        volume, points = ctx.saved_tensors
        C, N = volume.shape[0], len(points)
        dense = volume.reshape(C, -1)
        dvolume, dpoints = torch.zeros(dense.shape), torch.empty(N, 3)
        for at in range(0, N, BLOCK):
            part = slice(at, min(at + BLOCK, N))
            f, found = around(points[part], volume.shape[1:])
            slopes = torch.zeros(part.stop - at, 3)
            for corner, (place, inside) in zip(CORNERS, found, strict=True):
                wx, wy, wz = factors(f, corner)
                sx, sy, sz = (1.0 if up else -1.0 for up in corner)
                dvolume.index_add_(1, place, (gy[part] * (wx * wy * wz * inside).unsqueeze(1)).mT)
                value = (gy[part] * dense[:, place].mT).sum(1) * inside
                slopes[:, 0] += sx * wy * wz * value
                slopes[:, 1] += sy * wx * wz * value
                slopes[:, 2] += sz * wx * wy * value
            dpoints[part] = slopes
        return dvolume.view(volume.shape), dpoints


def kernel(volume, points):
    return Trilinear.apply(volume, points)


def target():
    return assay.Target(kernel, golden, cases=[points, flat], name="trilinear")
