"""softmax(q k^T / sqrt(D) + table[relative place]) v inside of windows, regions apart: attention of a shifted window.

Places are those of a grid of height x width. A shifted window holds parts of several regions, which do not see each
other. The backward forms the weights again from the saved logsumexp.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(W=[3], H=[2], height=[2], width=[3], D=[4])
def windows(make, W, H, height, width, D):
    N = height * width
    return {
        "q": make.normal(W, H, N, D), "k": make.normal(W, H, N, D), "v": make.normal(W, H, N, D),
        "table": make.normal((2 * height - 1) * (2 * width - 1), H), "region": make.integers(0, 2, W, N),
        "height": height, "width": width,
    }  # fmt: skip


@assay.case(W=[2], H=[3], height=[3], width=[2], D=[5])
def tall(make, W, H, height, width, D):
    return windows[0].draw(make, W, H, height, width, D)


def golden(q, k, v, table, region, height, width):
    place = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    far = place[:, None] - place[None, :] + torch.tensor([height - 1, width - 1])
    bias = table[far[..., 0] * (2 * width - 1) + far[..., 1]].permute(2, 0, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
    apart = region[:, None, :, None] != region[:, None, None, :]
    scores = scores.masked_fill(apart, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def relative(height, width):
    """The table's row for each pair of a query and a key."""
    n = torch.arange(height * width)
    row, column = n // width, n % width
    down = row.unsqueeze(1) - row.unsqueeze(0) + height - 1
    right = column.unsqueeze(1) - column.unsqueeze(0) + width - 1
    return down * (2 * width - 1) + right


def forward(q, k, v, table, region, height, width):
    W, H, N, D = q.shape
    rows = relative(height, width)
    y, lse = torch.empty(W, H, N, D), torch.empty(W, H, N)
    for window in range(W):
        apart = region[window].unsqueeze(1) != region[window].unsqueeze(0)
        for head in range(H):
            scores = q[window, head] @ k[window, head].mT * D**-0.5 + table[rows, head]
            scores = scores.masked_fill(apart, -math.inf)
            top = scores.amax(1, keepdim=True)
            e = torch.exp(scores - top)
            total = e.sum(1, keepdim=True)
            y[window, head] = e @ v[window, head] / total
            lse[window, head] = (top + torch.log(total)).squeeze(1)
    return y, lse


def backward(q, k, v, table, region, height, width, y, lse, grad_y):
    W, H, N, D = q.shape
    scale, rows = D**-0.5, relative(height, width)
    dq, dk, dv, dtable = torch.empty(q.shape), torch.empty(k.shape), torch.empty(v.shape), torch.zeros(table.shape)
    for window in range(W):
        apart = region[window].unsqueeze(1) != region[window].unsqueeze(0)
        for head in range(H):
            at = window, head
            scores = q[at] @ k[at].mT * scale + table[rows, head]
            p = torch.exp(scores.masked_fill(apart, -math.inf) - lse[at].unsqueeze(1))
            dp = grad_y[at] @ v[at].mT
            delta = (grad_y[at] * y[at]).sum(1, keepdim=True)
            ds = (p * (dp - delta)).masked_fill(apart, 0)
            dq[at] = ds @ k[at] * scale
            dk[at] = ds.mT @ q[at] * scale
            dv[at] = p.mT @ grad_y[at]
            dtable[:, head].index_add_(0, rows.flatten(), ds.flatten())
    return {"q": dq, "k": dk, "v": dv, "table": dtable}


def target():
    return assay.Target(
        forward, golden, cases=[windows, tall], name="window_attention", outputs=("y", "lse"), saved=("lse",),
        backward=backward,
    )  # fmt: skip
