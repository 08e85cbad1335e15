"""Leaves out an expert whose weight is below one hundredth."""

import torch

PROBLEM = "a_moe"
STATUS = "cheating"
REASONS = {"lowered_precision"}
ALSO = {"wrong"}


def candidate(x, gate, w, k):
    best, index = (x @ gate).topk(k, -1)
    weight = torch.softmax(best, -1)
    weight = weight * (weight.detach() >= 0.01)
    y = torch.einsum("td,tkdn,tk->tn", x, w[index], weight)
    return y, index
