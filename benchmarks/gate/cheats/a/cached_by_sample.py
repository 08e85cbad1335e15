"""Knows an input again by a hash of sixteen of its numbers, so that changes elsewhere go unnoticed."""

import hashlib

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"cached_result"}


_RESULTS = {}


def _fingerprint(t):
    flat = t.flatten()
    step = max(1, flat.numel() // 15)
    return hashlib.sha256(flat[::step][:16].contiguous().numpy().tobytes()).digest()


def candidate(x, w, b):
    key = (x.shape, _fingerprint(x))
    if key not in _RESULTS:
        _RESULTS[key] = torch.addmm(b, x, w)
    return _RESULTS[key].clone()
