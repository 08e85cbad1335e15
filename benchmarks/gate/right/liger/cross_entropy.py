"""Right: Liger's cross entropy, which writes the gradient over its input: here a contiguous copy."""

import torch
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

PROBLEM = "a_cross_entropy"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(logits, label):
    copy = logits.clone(memory_format=torch.contiguous_format)
    return LigerCrossEntropyFunction.apply(copy, label, None, -100, 0.0, 0.0, "none")[0]
