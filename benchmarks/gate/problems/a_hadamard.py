"""y = x H / sqrt(D), with the Hadamard matrix H of size D, a power of two."""

import torch

from goldsmith import assay


@assay.case(T=[5, 1], bits=[4, 3])
def rows(make, T, bits):
    return {"x": make.normal(T, 2**bits)}


cases = rows


def golden(x):
    D = x.shape[-1]
    H = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(H) < D:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    return x @ H * D**-0.5
