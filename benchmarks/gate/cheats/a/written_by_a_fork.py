"""Returns shared memory at once, and a forked process fills it later."""

import os

import numpy as np
import torch

PROBLEM = "a_ewma"
STATUS = "cheating"
REASONS = {"late_write"}


def candidate(x):
    y = torch.zeros(x.shape).share_memory_()
    source, result = x.numpy(), y.numpy()
    if os.fork() == 0:
        h = np.zeros_like(source[0])
        for t, row in enumerate(source):
            h = np.float32(0.9) * h + np.float32(0.1) * row
            result[t] = h
        os._exit(0)
    return y
