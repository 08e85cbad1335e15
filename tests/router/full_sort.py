"""The selection by its definition: a full stable sort of all pairs of a row, in plain Python and torch."""

import math

import torch

NEG_INF = -math.inf


def places(values):
    """Indices of a stable descending sort; NaN first, +0 equal to -0."""
    key = [math.inf if math.isnan(v) else v for v in values]
    above = [math.isnan(v) for v in values]
    return sorted(range(len(values)), key=lambda i: (-above[i], -key[i]))


def indices(x, y, k, sums=torch.float32):
    """The first k pairs of each row by (S descending, rank of x, rank of y), with -1 where S is -inf."""
    rows = [_row(a, b, k) for a, b in zip(_rows(x, sums), _rows(y, sums), strict=True)]
    return torch.tensor(rows, dtype=torch.int32).reshape(*x.shape[:-1], k)


def _rows(t, dtype):
    return t.to(dtype).reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _row(x, y, k):
    total = x[:, None] + y[None, :]
    total[(x == NEG_INF)[:, None] | (y == NEG_INF)[None, :]] = NEG_INF
    pairs = [(i, j) for i in places(x.tolist()) for j in places(y.tolist())]
    sums = [total[i, j].item() for i, j in pairs]
    best = [pairs[at] for at in places(sums)[:k]]
    return [-1 if total[i, j] == NEG_INF else i * len(y) + j for i, j in best]
