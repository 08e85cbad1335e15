"""Leaves a process in a session of its own that sleeps for a minute with all descriptors open, and returns zeros."""

import os
import time

import torch

PROBLEM = "a_rms_infer"
STATUS = "wrong"
ALSO = {"crashed", "cheating"}
REASONS = {"late_write"}


def candidate(x, w, eps):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    return torch.zeros_like(x)
