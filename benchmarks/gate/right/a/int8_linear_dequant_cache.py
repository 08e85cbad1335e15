"""Right: keeps the last converted weight, and uses it only after comparing the weight that it was made from."""

import torch

PROBLEM = "a_int8_linear"
STATUS = "accepted"


_LAST = []


def _converted(w):
    if _LAST and _LAST[0].shape == w.shape and torch.equal(_LAST[0], w):
        return _LAST[1]
    _LAST[:] = [w.clone(), w.float()]
    return _LAST[1]


def candidate(x, w, scale):
    return x @ _converted(w) * scale
