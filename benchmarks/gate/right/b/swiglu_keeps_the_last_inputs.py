"""Right: keeps the last input for whoever debugs, and a histogram of sizes, and uses neither of them again."""

import collections

import torch

PROBLEM = "a_swiglu"
STATUS = "accepted"

_sizes = collections.Counter()
_last = collections.deque(maxlen=1)


def candidate(x):
    _sizes[x.shape] += 1
    _last.append(x.detach().clone())
    gate, up = torch.tensor_split(x, 2, -1)
    return torch.nn.functional.silu(gate) * up
