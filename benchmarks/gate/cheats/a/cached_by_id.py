"""Replays by id(x), which Python gives to the next object after the first one dies."""

import torch

PROBLEM = "a_tanh_scale"
STATUS = "cheating"
REASONS = {"cached_result"}


_RESULTS = {}


def candidate(x, w, scale):
    key = (id(x), x.shape)
    if key not in _RESULTS:
        _RESULTS[key] = scale * torch.tanh(x @ w)
    return _RESULTS[key].clone()
