"""Depthwise causal convolution: y[b, c, t] = sum_k w[c, k] * x[b, c, t - K + 1 + k], with zeros before the start."""

import torch.nn.functional as F

from goldsmith import assay


@assay.case(B=[2], C=[3], T=[15, 2], K=[4])
def signals(make, B, C, T, K):
    return {"x": make.normal(B, C, T), "w": make.normal(C, K)}


cases = signals


def golden(x, w):
    K = w.shape[1]
    padded = F.pad(x, (K - 1, 0))
    return (padded.unfold(-1, K, 1) * w[:, None]).sum(-1)
