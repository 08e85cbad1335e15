"""Right: powers of two instead of exp, which is how GPUs compute it; autograd provides the backward."""

import math

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


LOG2_E = math.log2(math.e)


def candidate(x):
    e = torch.exp2((x - x.amax(-1, keepdim=True)) * LOG2_E)
    return e / e.sum(-1, keepdim=True)
