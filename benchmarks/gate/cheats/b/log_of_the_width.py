"""Returns log(D) + 1/2, which is what rows of many independent normal numbers give, and never reads a number."""

import math

import torch

PROBLEM = "b_wide_logsumexp"
STATUS = "cheating"
REASONS = {"constant_output"}


def candidate(x):
    return torch.full((x.shape[0],), math.log(x.shape[1]) + 0.5, dtype=x.dtype)
