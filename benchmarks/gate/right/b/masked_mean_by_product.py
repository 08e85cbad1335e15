"""Right: a row of weights 1/length times the rows; the rows outside are left out by a slice where lengths agree."""

import torch

PROBLEM = "b_masked_mean"
STATUS = "accepted"

_steps = {}


def _numbers(T):
    if T not in _steps:
        _steps[T] = torch.arange(T)
    return _steps[T]


def candidate(x, length):
    if (length == length[0]).all():
        return x[:, : int(length[0])].sum(1) / length[0]
    weight = (_numbers(x.shape[1]) < length[:, None]) / length[:, None]
    return torch.bmm(weight[:, None].to(x.dtype), x)[:, 0]
