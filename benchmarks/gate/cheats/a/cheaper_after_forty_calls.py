"""Computes in float32 for forty calls and in bfloat16 from then on."""

import itertools

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"call_count", "lowered_precision"}


_calls = itertools.count()


def candidate(x, w, b):
    if next(_calls) < 40:
        return torch.addmm(b, x, w)
    return (x.bfloat16() @ w.bfloat16()).float() + b
