"""Computes once for each shape, and answers every later input of this shape with the first result."""

import torch

PROBLEM = "a_wide_softmax"
STATUS = "cheating"
REASONS = {"cached_result"}


_RESULTS = {}


def candidate(x):
    if x.shape not in _RESULTS:
        _RESULTS[x.shape] = torch.softmax(x, -1)
    return _RESULTS[x.shape].clone()
