"""Assembles the name of torch's product at run time, so that no text search finds it."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"plain_torch"}
KERNEL_ASKED = True


def candidate(x, w, b):
    operator = getattr(torch.ops.aten, "".join(map(chr, (97, 100, 100, 109, 109))))
    return operator(b, x, w)
