"""Right: erfc of the negative argument keeps the digits of the left tail."""

import torch

PROBLEM = "a_gelu"
STATUS = "accepted"


def candidate(x):
    return 0.5 * x * torch.special.erfc(x * -(0.5**0.5))
