"""y[b] = mean of the first length[b] rows of x[b]; most batches hold sequences of full length."""

import torch

from goldsmith import assay


@assay.case(B=[4, 1], T=[12, 5], D=[10])
def full(make, B, T, D):
    return {"x": make.normal(B, T, D), "length": torch.full((B,), T, device=make.device)}


@assay.case(B=[4], T=[12], D=[10])
def ragged(make, B, T, D):
    return {"x": make.normal(B, T, D), "length": make.integers(1, T + 1, B)}


cases = [full, ragged]


def golden(x, length):
    inside = torch.arange(x.shape[1], device=x.device) < length[:, None]
    return (x * inside[..., None]).sum(1) / length[:, None]
