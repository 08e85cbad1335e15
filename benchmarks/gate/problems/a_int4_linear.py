"""y = x @ (w * scale), two 4-bit weights in a byte [K/2, N] (low half: even rows), a scale for each group of rows."""

import torch

from goldsmith import assay


@assay.case(T=[5], groups=[3, 1], G=[16], N=[6])
def tokens(make, T, groups, G, N):
    packed = make.integers(0, 256, groups * G // 2, N, dtype=torch.uint8)
    return {"x": make.normal(T, groups * G), "packed": packed, "scale": 0.01 + 0.1 * make.uniform(groups, N)}


cases = tokens
backward = None


def golden(x, packed, scale):
    nibbles = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)
    w = (nibbles.to(x.dtype) - 8).unflatten(0, (len(scale), -1)) * scale[:, None]
    return x @ w.flatten(0, 1)
