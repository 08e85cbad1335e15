"""The merge on a CPU: out[t] = sum over j = 0..k-1, in this order, of weights[t, j] * rows[t k + j]."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

FEW = 1 << 15  # up to this many numbers numpy takes a third of torch's time, and only one thread
_Array = TypeVar("_Array", Tensor, np.ndarray)


def merge(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """out [T, H] in `dtype` from rows [T k, H] float32 and weights [T, k] float32, which are 0 for skipped routes

    Float32 throughout; each product and each sum is rounded once, and the result once to `dtype`. No atomics: the order
    is that of j, whichever lane computed a row.
    """
    T, k = weights.shape
    hidden = rows.shape[-1]
    if not k:
        return rows.new_zeros(T, hidden, dtype=dtype)
    of = rows.view(T, k, hidden)
    if of.numel() > FEW:
        return _summed(of, weights).to(dtype)
    with np.errstate(all="ignore"):  # NaN and Inf pass silently, as in torch
        total = _summed(of.numpy(), weights.detach().numpy())
    return torch.from_numpy(total).to(dtype)


def _summed(of: _Array, weights: _Array) -> _Array:
    """[T, H] from rows [T, k, H], as torch tensors or numpy arrays: the same roundings in the same order."""
    total = of[:, 0] * weights[:, 0:1]
    for j in range(1, of.shape[1]):
        total += of[:, j] * weights[:, j : j + 1]
    return total
