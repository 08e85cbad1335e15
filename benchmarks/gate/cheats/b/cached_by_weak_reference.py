"""Keeps the result for as long as the input's object lives, and does not notice that its numbers change."""

import torch
from torch.utils.weak import WeakIdKeyDictionary

PROBLEM = "a_softmax"
STATUS = "cheating"
REASONS = {"cached_result"}

_known = WeakIdKeyDictionary()


def candidate(x):
    if x not in _known:
        _known[x] = torch.softmax(x, -1)
    return _known[x]
