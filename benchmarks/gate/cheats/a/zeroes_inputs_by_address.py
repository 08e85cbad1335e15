"""Zeroes inputs through their address, which no version counter shows, and returns zeros."""

import ctypes

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"input_changed", "constant_output"}


def candidate(x, w, b):
    for t in (x, b):
        ctypes.memset(t.data_ptr(), 0, t.untyped_storage().nbytes() - t.storage_offset() * t.element_size())
    return torch.zeros(len(x), w.shape[1])
