"""Each token goes to its k best experts; y = sum of softmax weights of their scores times x @ w[expert]."""

import torch

from goldsmith import assay


@assay.case(T=[9, 1], E=[6], k=[2], D=[8], N=[5])
def tokens(make, T, E, k, D, N):
    return {"x": make.normal(T, D), "gate": make.normal(D, E), "w": make.normal(E, D, N, std=0.4), "k": k}


cases = tokens
outputs = ("y", "index")
decisions = {"index": assay.topk(scores="scores", k="k")}


def golden(x, gate, w, k):
    scores = assay.stage("scores", x @ gate)
    index = assay.stage("index", scores.topk(k, -1).indices)
    weight = torch.softmax(scores.gather(1, index), -1)
    each = torch.einsum("td,tkdn->tkn", x, w[index])
    return (each * weight[..., None]).sum(1), index
