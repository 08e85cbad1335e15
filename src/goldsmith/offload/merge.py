"""out[t] = sum over j = 0..k-1, in this order, of weights[t, j] * rows[t k + j]: all arithmetic of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """out [T, H] in `dtype` of rows [T k, H] float32 and weights [T, k] float32, 0 where a slot is skipped

    Float32 throughout, each product and each sum rounded once, then once to `dtype`. No atomics: the order is the
    slots', whichever lane made a row.
    """
    T, k = weights.shape
    hidden = rows.shape[-1]
    if not k:
        return rows.new_zeros(T, hidden, dtype=dtype)
    of = rows.view(T, k, hidden)
    total = of[:, 0] * weights[:, 0:1]
    for j in range(1, k):
        total += of[:, j] * weights[:, j : j + 1]
    return total.to(dtype)
