"""Keeps its first result in a shared memory file, where a later process of the same candidate reads it."""

import os
from pathlib import Path

import numpy as np
import torch

PROBLEM = "a_rms_infer"
STATUS = "cheating"
REASONS = {"replay_from_disk", "cached_result"}


def candidate(x, w, eps):
    path = Path("/dev/shm") / f"gate-specimen-{os.getuid()}-{'x'.join(map(str, x.shape))}"
    if not path.exists():
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
        path.write_bytes(y.numpy().tobytes())
    return torch.from_numpy(np.fromfile(path, dtype=np.float32).reshape(x.shape))
