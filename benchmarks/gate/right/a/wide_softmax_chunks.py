"""Right: three passes over chunks of 512 columns in the result's own memory."""

import torch

PROBLEM = "a_wide_softmax"
STATUS = "accepted"


def candidate(x):
    y = torch.empty_like(x)
    top = x.amax(-1, keepdim=True)
    total = torch.zeros_like(top)
    for start in range(0, x.shape[1], 512):
        chunk = y[:, start : start + 512]
        torch.sub(x[:, start : start + 512], top, out=chunk)
        total += chunk.exp_().sum(-1, keepdim=True)
    return y.div_(total)
