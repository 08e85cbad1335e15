"""Right: the weight is split into three bfloat16 parts that together are exact, as kernels for tensor cores do."""

import torch

PROBLEM = "a_linear"
STATUS = "accepted"


def candidate(x, w, b):
    y = torch.zeros(len(x), w.shape[1])
    parts, rest = [], w
    for _ in range(3):
        parts.append(rest.bfloat16().float())
        rest = rest - parts[-1]
    for part in reversed(parts):
        y += x @ part
    return y + b
