"""Every call of one shape writes to the same buffer and returns it, so a later call changes the earlier result."""

import torch

PROBLEM = "a_tanh_scale"
STATUS = "cheating"
REASONS = {"reused_memory", "aliased_output", "late_write", "cached_result"}


_RESULTS = {}


def candidate(x, w, scale):
    y = _RESULTS.setdefault(x.shape, torch.zeros(x.shape))
    torch.mm(x, w, out=y)
    return y.tanh_().mul_(scale)
