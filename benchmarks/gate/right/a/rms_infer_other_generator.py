"""Right: draws a random order for its sums from a generator of its own and leaves torch's generator alone."""

import torch

PROBLEM = "a_rms_infer"
STATUS = "accepted"


_GENERATOR = torch.Generator().manual_seed(7)


def candidate(x, w, eps):
    order = torch.randperm(x.shape[1], generator=_GENERATOR)
    squares = x.square()[:, order].sum(-1, keepdim=True)
    return x * torch.rsqrt(squares / x.shape[1] + eps) * w
