"""out[t] = sum over j = 0..k-1, in this order, of weights[t, j] * rows[t k + j]: all arithmetic of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

FEW = 1 << 15  # numbers; so few are done by numpy in a third of the time of torch's operations, and by one thread


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
    if of.numel() > FEW:
        return _summed(of, weights).to(dtype)
    with np.errstate(all="ignore"):  # NaN and Inf pass as they do in torch
        total = _summed(of.numpy(), weights.detach().numpy())
    return torch.from_numpy(total).to(dtype)


def _summed(of: Any, weights: Any) -> Any:
    """[T, H] of rows [T, k, H], of torch's tensors or of numpy's arrays: the same roundings in the same order."""
    total = of[:, 0] * weights[:, 0:1]
    for j in range(1, of.shape[1]):
        total += of[:, j] * weights[:, j : j + 1]
    return total
