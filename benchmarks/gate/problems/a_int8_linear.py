"""y = x @ (w * scale), with w in 8 bits [K, N] and a scale for each column; sums in float32."""

import torch

from goldsmith import assay


@assay.case(T=[6, 1], K=[40], N=[7])
def tokens(make, T, K, N):
    w = make.integers(-127, 128, K, N, dtype=torch.int8)
    return {"x": make.normal(T, K), "w": w, "scale": 0.001 + 0.01 * make.uniform(N)}


cases = tokens
backward = None


def golden(x, w, scale):
    return x @ (w.to(x.dtype) * scale)
