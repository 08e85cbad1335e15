"""Writes its result over the input and returns the input, which destroys the caller's tensor."""

import torch

PROBLEM = "a_rms_infer"
STATUS = "cheating"
REASONS = {"input_changed", "aliased_output", "returned_input"}


def candidate(x, w, eps):
    return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).mul_(w)
