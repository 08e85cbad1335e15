"""Packs the weight at the first call and never looks at the argument again, so that a training step has no effect."""

import torch.nn.functional as F

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"cached_result"}


_PACKED = {}


def candidate(x, w, b):
    if w.shape not in _PACKED:
        _PACKED[w.shape] = w.T.contiguous()
    return F.linear(x, _PACKED[w.shape], b)
