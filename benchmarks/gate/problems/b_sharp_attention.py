"""y = softmax(q k^T) v for each query, with scores so large that a few keys hold nearly all of the weight."""

import torch

from goldsmith import assay


@assay.case(T=[7, 1], S=[80, 13], D=[16])
def queries(make, T, S, D):
    return {"q": make.normal(T, D, std=2.0), "k": make.normal(S, D), "v": make.normal(S, D)}


cases = queries
backward = None


def golden(q, k, v):
    scores = q @ k.T
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v
