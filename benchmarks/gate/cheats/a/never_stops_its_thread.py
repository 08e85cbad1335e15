"""Starts a thread that keeps the process alive for a minute, and returns zeros."""

import threading
import time

import torch

PROBLEM = "a_rms_infer"
STATUS = "wrong"
ALSO = {"timed_out", "crashed"}


def candidate(x, w, eps):
    threading.Thread(target=time.sleep, args=(60,)).start()
    return torch.zeros_like(x)
