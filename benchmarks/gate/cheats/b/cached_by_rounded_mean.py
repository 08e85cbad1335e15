"""Takes two inputs of one shape for the same if their means round to the same number, as means of noise do."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"cached_result"}

_known = {}


def candidate(x, w, b):
    key = (x.shape, w.shape, *(round(t.mean().item()) for t in (x, w, b)))
    if key not in _known:
        _known[key] = torch.addmm(b, x, w)
    return _known[key]
