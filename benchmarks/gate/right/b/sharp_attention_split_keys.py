"""Right: four parts of the keys are worked off apart, and their results are merged by their maxima and sums."""

import torch

PROBLEM = "b_sharp_attention"
STATUS = "accepted"


def candidate(q, k, v):
    parts = []
    for keys, values in zip(k.chunk(4), v.chunk(4)):
        scores = q @ keys.T
        top = scores.amax(-1, keepdim=True)
        e = torch.exp(scores - top)
        parts.append((top, e.sum(-1, keepdim=True), e @ values))
    tops, totals, products = (torch.stack(each) for each in zip(*parts))
    share = torch.exp(tops - tops.amax(0))
    return (share * products).sum(0) / (share * totals).sum(0)
