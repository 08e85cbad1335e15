"""Right: a subclass marks tensors inside the function and is taken off before the return."""

import torch
import torch.nn.functional as F

PROBLEM = "a_linear"
STATUS = "accepted"


class Packed(torch.Tensor):
    """A weight that is stored transposed."""


def candidate(x, w, b):
    packed = w.T.contiguous().as_subclass(Packed)
    y = F.linear(x.as_subclass(Packed), packed, b)
    return y.as_subclass(torch.Tensor)
