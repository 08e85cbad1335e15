"""y = silu(x @ w1) @ w2 in bfloat16; the middle may be rounded to bfloat16, all sums are float32."""

import torch

from goldsmith import assay


@assay.case(T=[6], D=[24], N=[32, 11])
def tokens(make, T, D, N):
    return {"x": make.normal(T, D), "w1": make.normal(D, N, std=0.2), "w2": make.normal(N, D, std=0.2)}


cases = tokens
dtypes = (torch.bfloat16,)
stored = {"h": "x"}
backward = None


def golden(x, w1, w2):
    gate = x @ w1
    h = assay.stage("h", gate * torch.sigmoid(gate))
    return h @ w2
