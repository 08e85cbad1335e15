"""Takes memory in pieces of 256 MiB, at most 7 GiB."""

import torch

PROBLEM = "a_linear"
STATUS = "over_memory"


def candidate(x, w, b):
    pieces = [torch.ones(1 << 26) for _ in range(28)]
    return torch.full((len(x), w.shape[1]), pieces[-1][0].item())
