"""xy and conic of Gaussians seen by a camera: EWA's projection, as in 3D Gaussian splatting, and its backward.

A covariance R diag(scale)^2 R^T with R of a quaternion (w, x, y, z) goes through the camera and the local Jacobian of
the projection, 0.3 pixels are added, and its inverse is stored as (xx, xy, yy). What is not in front of the camera
gives zeros. Points go in tiles.
"""

from __future__ import annotations

import torch

from goldsmith import assay

TILE, NEAR, WIDER = 4, 0.2, 0.3


@assay.case(P=[6], fx=[1.5], fy=[2.0])
def points(make, P, fx, fy):
    mean = make.normal(P, 3)
    mean[1, 2] = -14.0  # behind the camera, which looks along the third axis
    turn = torch.linalg.qr(make.normal(3, 3).double())[0].to(mean.dtype) * 0.3 + torch.eye(3).to(mean.dtype)
    view = torch.cat([turn, torch.tensor([[0.1], [-0.2], [5.0]]).to(mean.dtype)], 1)
    return {
        "mean": mean, "quat": make.normal(P, 4), "scale": 0.5 + make.uniform(P, 3), "view": view, "fx": fx, "fy": fy,
    }  # fmt: skip


@assay.case(P=[3], fx=[0.8], fy=[0.6])
def few(make, P, fx, fy):
    return points[0].draw(make, P, fx, fy)


@assay.case(P=[9], fx=[3.0], fy=[1.0])
def oblong(make, P, fx, fy):
    return points[0].draw(make, P, fx, fy)


def rotation(unit):
    """Matrices of unit quaternions."""
    w, x, y, z = unit.unbind(1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return torch.stack(rows, 1).unflatten(1, (3, 3))


def golden(mean, quat, scale, view, fx, fy):
    unit = quat * torch.rsqrt(quat.square().sum(1, keepdim=True) + 1e-12)
    w, x, y, z = unit.unbind(1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    half = torch.stack(rows, 1).unflatten(1, (3, 3)) * scale.unsqueeze(1)
    cov = assay.stage("cov", half @ half.mT)
    cam = assay.stage("cam", mean @ view[:, :3].mT + view[:, 3])
    near = cam[:, 2:] > NEAR
    cx, cy, cz = torch.where(near, cam, 1.0).unbind(1)
    zero = torch.zeros_like(cz)
    jac = torch.stack([fx / cz, zero, -fx * cx / cz**2, zero, fy / cz, -fy * cy / cz**2], 1).unflatten(1, (2, 3))
    t = jac @ view[:, :3]
    flat = t @ cov @ t.mT
    cov2d = assay.stage("cov2d", torch.stack([flat[:, 0, 0] + WIDER, flat[:, 0, 1], flat[:, 1, 1] + WIDER], 1))
    a, b, c = cov2d.unbind(1)
    conic = torch.stack([c, -b, a], 1) / (a * c - b * b).unsqueeze(1)
    return torch.where(near, torch.stack([fx * cx / cz, fy * cy / cz], 1), 0.0), torch.where(near, conic, 0.0)


def jacobian(cx, cy, cz, fx, fy):
    zero = torch.zeros(cz.shape)
    rows = [fx / cz, zero, -fx * cx / (cz * cz), zero, fy / cz, -fy * cy / (cz * cz)]
    return torch.stack(rows, 1).unflatten(1, (2, 3))


def tiles(P):
    return [slice(at, min(at + TILE, P)) for at in range(0, P, TILE)]


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, quat, scale, view, fx, fy):
        P, turn = len(mean), view[:, :3]
        inv, unit = torch.empty(P, 1), torch.empty(P, 4)
        cov, cam, cov2d = torch.empty(P, 3, 3), torch.empty(P, 3), torch.empty(P, 3)
        xy, conic = torch.empty(P, 2), torch.empty(P, 3)
        for now in tiles(P):
            inv[now] = torch.rsqrt((quat[now] * quat[now]).sum(1, keepdim=True) + 1e-12)
            unit[now] = quat[now] * inv[now]
            half = rotation(unit[now]) * scale[now].unsqueeze(1)
            cov[now] = half @ half.mT
            cam[now] = mean[now] @ turn.mT + view[:, 3]
        cov, cam = assay.stage("cov", cov), assay.stage("cam", cam)
        near = cam[:, 2:] > NEAR
        for now in tiles(P):
            cx, cy, cz = torch.where(near[now], cam[now], 1.0).unbind(1)
            t = jacobian(cx, cy, cz, fx, fy) @ turn
            flat = t @ cov[now] @ t.mT
            cov2d[now, 0], cov2d[now, 1], cov2d[now, 2] = flat[:, 0, 0] + WIDER, flat[:, 0, 1], flat[:, 1, 1] + WIDER
            xy[now] = torch.where(near[now], torch.stack([fx * cx / cz, fy * cy / cz], 1), 0.0)
        cov2d = assay.stage("cov2d", cov2d)
        for now in tiles(P):
            a, b, c = cov2d[now].unbind(1)
            inverse = torch.stack([c, -b, a], 1) / (a * c - b * b).unsqueeze(1)
            conic[now] = torch.where(near[now], inverse, 0.0)
        ctx.save_for_backward(scale, view, inv, unit, cov, cam, cov2d)
        ctx.fx, ctx.fy = fx, fy
        return xy, conic

    @staticmethod
    def backward(ctx, g_xy, g_conic):
        scale, view, inv, unit, cov, cam, cov2d = ctx.saved_tensors
        fx, fy, turn = ctx.fx, ctx.fy, view[:, :3]
        near = cam[:, 2:] > NEAR
        dxy, dconic = torch.where(near, g_xy, 0.0), torch.where(near, g_conic, 0.0)
        a, b, c = cov2d.unbind(1)
        det = a * c - b * b
        ddet = -(dconic[:, 0] * c - dconic[:, 1] * b + dconic[:, 2] * a) / (det * det)
        da, db = dconic[:, 2] / det + ddet * c, -dconic[:, 1] / det - 2 * b * ddet
        dc = dconic[:, 0] / det + ddet * a
        dcov2d = assay.stage("cov2d.grad", torch.stack([da, db, dc], 1))
        cx, cy, cz = torch.where(near, cam, 1.0).unbind(1)
        da, db, dc = dcov2d.unbind(1)
        square = torch.stack([da, db / 2, db / 2, dc], 1).unflatten(1, (2, 2))
        t = jacobian(cx, cy, cz, fx, fy) @ turn
        dcov = t.mT @ square @ t
        dt = 2 * square @ t @ cov
        # through the scales and the rotation
        rot = rotation(unit)
        dhalf = 2 * dcov @ (rot * scale.unsqueeze(1))
        dscale = (dhalf * rot).sum(1)
        d = dhalf * scale.unsqueeze(1)
        w, x, y, z = unit.unbind(1)
        dw = x * (d[:, 2, 1] - d[:, 1, 2]) + y * (d[:, 0, 2] - d[:, 2, 0]) + z * (d[:, 1, 0] - d[:, 0, 1])
        dx = w * (d[:, 2, 1] - d[:, 1, 2]) + y * (d[:, 0, 1] + d[:, 1, 0]) + z * (d[:, 0, 2] + d[:, 2, 0])
        dy = w * (d[:, 0, 2] - d[:, 2, 0]) + x * (d[:, 0, 1] + d[:, 1, 0]) + z * (d[:, 1, 2] + d[:, 2, 1])
        dz = w * (d[:, 1, 0] - d[:, 0, 1]) + x * (d[:, 0, 2] + d[:, 2, 0]) + y * (d[:, 1, 2] + d[:, 2, 1])
        dx = dx - 2 * x * (d[:, 1, 1] + d[:, 2, 2])
        dy = dy - 2 * y * (d[:, 0, 0] + d[:, 2, 2])
        dz = dz - 2 * z * (d[:, 0, 0] + d[:, 1, 1])
        dunit = 2 * torch.stack([dw, dx, dy, dz], 1)
        dquat = inv * (dunit - unit * (dunit * unit).sum(1, keepdim=True))
        # through the Jacobian and the place
        djac = dt @ turn.mT
        z2, z3 = cz * cz, cz * cz * cz
        dx = fx * dxy[:, 0] / cz - fx * djac[:, 0, 2] / z2
        dy = fy * dxy[:, 1] / cz - fy * djac[:, 1, 2] / z2
        dz = -(fx * djac[:, 0, 0] + fy * djac[:, 1, 1]) / z2
        dz = dz + 2 * (fx * cx * djac[:, 0, 2] + fy * cy * djac[:, 1, 2]) / z3
        dz = dz - (fx * cx * dxy[:, 0] + fy * cy * dxy[:, 1]) / z2
        dcam = torch.where(near, torch.stack([dx, dy, dz], 1), 0.0)
        return dcam @ turn, dquat, dscale, None, None, None


def kernel(mean, quat, scale, view, fx, fy):
    return Project.apply(mean, quat, scale, view, fx, fy)


def target():
    return assay.Target(
        kernel, golden, cases=[points, few, oblong], name="splat_project", outputs=("xy", "conic"),
        grads=("mean", "quat", "scale"),
    )  # fmt: skip
