"""The k best scores of each token and their softmax weights."""

import torch

from goldsmith import assay


@assay.case(T=[8, 1], E=[12], k=[3])
def tokens(make, T, E, k):
    return {"scores": make.normal(T, E), "k": k}


@assay.case(T=[8], E=[12], k=[3])
def ties(make, T, E, k):
    return {"scores": make.tied(T, E, levels=6), "k": k}


cases = [tokens, ties]
outputs = ("weight", "index")
decisions = {"index": assay.topk(scores="scores", k="k")}


def golden(scores, k):
    index = assay.stage("index", scores.topk(k, -1).indices)
    return torch.softmax(scores.gather(1, index), -1), index
