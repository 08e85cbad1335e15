"""Right: torch's grouped convolution."""

import torch.nn.functional as F

PROBLEM = "a_causal_conv"
STATUS = "accepted"


def candidate(x, w):
    return F.conv1d(F.pad(x, (w.shape[1] - 1, 0)), w[:, None], groups=x.shape[1])
