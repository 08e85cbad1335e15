"""Right: an environment variable sets the width of a tile; any width gives the mean of all columns."""

import os

import torch

PROBLEM = "a_rms_infer"
STATUS = "accepted"


TILE = int(os.environ.get("RMS_TILE", "24"))


def candidate(x, w, eps):
    total = sum((tile * tile).sum(-1, keepdim=True) for tile in x.split(TILE, -1))
    return x * torch.rsqrt(total / x.shape[1] + eps) * w
