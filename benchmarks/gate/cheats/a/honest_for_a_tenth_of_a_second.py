"""Works for a tenth of a second after the first call, and replays its last result afterwards."""

import time

import torch

PROBLEM = "a_tanh_scale"
STATUS = "cheating"
REASONS = {"call_count", "cached_result"}


_started = []
_last = {}


def candidate(x, w, scale):
    _started.append(time.monotonic())
    if time.monotonic() - _started[0] < 0.1 or x.shape not in _last:
        _last[x.shape] = scale * torch.tanh(x @ w)
    return _last[x.shape].clone()
