"""Reads address 0, so that the system ends the process."""

import ctypes

import torch

PROBLEM = "a_linear"
STATUS = "crashed"


def candidate(x, w, b):
    return torch.tensor(list(ctypes.string_at(0, 8)))
