"""Right: both results are halves of one new buffer and do not overlap."""

import torch

PROBLEM = "a_momentum"
STATUS = "accepted"


def candidate(p, g, velocity, lr, mu):
    results = torch.empty(2, p.numel())
    torch.add(g, velocity, alpha=mu, out=results[1])
    torch.add(g, results[1], alpha=mu, out=results[0])
    results[0].mul_(-lr).add_(p)
    return results[0], results[1]
