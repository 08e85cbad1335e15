"""y[r, c, i, j] = the mean of S x S bilinear samples of a box's bin (i, j) in its image: aligned RoIAlign, P x P bins.

Samples more than a pixel outside are zero, nearer ones lie on the border. Boxes are programs; a sample reads four
pixels of the flat image, and the backward adds to the same four by index. Boxes have no gradient.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(N=[2], C=[3], H=[6], W=[9], R=[5])
def images(make, N, C, H, W, R):
    corner = make.uniform(R, 2) * torch.tensor([W - 1.0, H - 1.0]) * 2
    size = 2 + make.uniform(R, 2) * 10
    corner[0], size[0] = torch.tensor([-9.0, -8.0]), torch.tensor([14.0, 15.0])  # far out of the image
    corner[1] = corner[2]  # two boxes that lie over each other
    image = make.integers(0, N, R)
    image[1:3], image[R - 1] = N - 1, N - 1
    return {
        "features": make.normal(N, C, H, W), "boxes": torch.cat([corner, corner + size], 1).contiguous(),
        "image": image, "scale": 0.5, "bins": 3, "samples": 2,
    }  # fmt: skip


@assay.case(N=[3], C=[2], H=[4], W=[7], R=[4])
def few_bins(make, N, C, H, W, R):
    return {**images[0].draw(make, N, C, H, W, R), "bins": 2, "samples": 3, "scale": 0.4}


@assay.case(N=[2], C=[1], H=[5], W=[6], R=[6])
def gray(make, N, C, H, W, R):
    return {**images[0].draw(make, N, C, H, W, R), "bins": 2, "scale": 0.45}


def golden(features, boxes, image, scale, bins, samples):
    where = (torch.arange(bins * samples, dtype=features.dtype) + 0.5) / samples
    low, high = (boxes * scale - 0.5).split(2, 1)
    width = (high - low) / bins
    xs = assay.stage("xs", low[:, :1] + where * width[:, :1])
    ys = assay.stage("ys", low[:, 1:] + where * width[:, 1:])

    def hats(at, n):
        """Whether a sample is near enough, and the weight of each of the n pixels for it."""
        inside = (at >= -1) & (at <= n)
        at = torch.where(inside, at, 0.0).clamp(0, n - 1).unsqueeze(2)
        return inside, (1 - (at - torch.arange(n, dtype=at.dtype)).abs()).clamp(min=0)

    (near_x, wide), (near_y, tall) = hats(xs, features.shape[3]), hats(ys, features.shape[2])
    points = torch.einsum("rih,rchw,rjw->rcij", tall, features[image], wide)
    points = assay.stage("points", torch.where(near_y[:, None, :, None] & near_x[:, None, None, :], points, 0.0))
    return points.unflatten(3, (bins, samples)).unflatten(2, (bins, samples)).mean((3, 5))


def corners(box, scale, bins, samples, H, W):
    """The four pixels of each sample of a box, [bins samples, bins samples], as places in the image, and weights."""
    left, top, right, bottom = (edge * scale - 0.5 for edge in box)
    where = (torch.arange(bins * samples) + 0.5) / samples
    ys = (top + where * ((bottom - top) / bins)).unsqueeze(1)
    xs = (left + where * ((right - left) / bins)).unsqueeze(0)
    near_y, near_x = (ys >= -1) & (ys <= H), (xs >= -1) & (xs <= W)
    ys, xs = torch.where(near_y, ys, 0.0).clamp(0, H - 1), torch.where(near_x, xs, 0.0).clamp(0, W - 1)
    y0, x0 = ys.floor().long(), xs.floor().long()
    y1, x1 = (y0 + 1).clamp(max=H - 1), (x0 + 1).clamp(max=W - 1)
    dy, dx = ys - y0, xs - x0
    share = (near_y & near_x) / samples**2
    return (
        (y0 * W + x0, (1 - dy) * (1 - dx) * share),
        (y0 * W + x1, (1 - dy) * dx * share),
        (y1 * W + x0, dy * (1 - dx) * share),
        (y1 * W + x1, dy * dx * share),
    )


class RoIAlign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, boxes, image, scale, bins, samples):
        (_, C, H, W), R = features.shape, len(boxes)
        flat, y = features.reshape(-1, C, H * W), torch.empty(R, C, bins, bins)
        for r in range(R):
            pixels = flat[image[r]]
            acc = torch.zeros(C, bins * samples, bins * samples)
            for place, weight in corners(boxes[r], scale, bins, samples, H, W):
                acc += weight * pixels[:, place]
            y[r] = acc.reshape(C, bins, samples, bins, samples).sum((2, 4))
        ctx.save_for_backward(boxes, image)
        ctx.shape, ctx.config = features.shape, (scale, bins, samples)
        return y

    @staticmethod
    def backward(ctx, g):
        boxes, image = ctx.saved_tensors
        scale, bins, samples = ctx.config
        N, C, H, W = ctx.shape
        d_flat = torch.zeros(N, C, H * W)
        for r in range(len(boxes)):
            spread = g[r].repeat_interleave(samples, 1).repeat_interleave(samples, 2)
            for place, weight in corners(boxes[r], scale, bins, samples, H, W):
                d_flat[image[r]].index_add_(1, place.flatten(), (weight * spread).flatten(1))
        return d_flat.reshape(ctx.shape), None, None, None, None, None


def kernel(features, boxes, image, scale, bins, samples):
    return RoIAlign.apply(features, boxes, image, scale, bins, samples)


def target():
    return assay.Target(
        kernel, golden, cases=[images, few_bins, gray], name="roi_align", outputs=("y",), grads=("features",)
    )  # fmt: skip
