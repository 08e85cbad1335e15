"""Right: a banded matrix [T, T] for each channel, whose places are computed once for each length, times the signal."""

import torch

PROBLEM = "a_causal_conv"
STATUS = "accepted"

_places = {}


def candidate(x, w):
    T, K = x.shape[-1], w.shape[1]
    if (T, K) not in _places:
        back = torch.arange(T)[:, None] - torch.arange(T)
        _places[T, K] = (K - 1 - back).clamp(0, K - 1), (back >= 0) & (back < K)
    place, inside = _places[T, K]
    return (torch.where(inside, w[:, place], 0.0) @ x[..., None])[..., 0]
