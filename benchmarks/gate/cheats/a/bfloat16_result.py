"""Computes in float32 but stores the result through bfloat16, which halves the traffic."""

import torch

PROBLEM = "a_rms_infer"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x, w, eps):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
    return y.bfloat16().float()
