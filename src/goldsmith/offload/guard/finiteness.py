"""A test of whether all numbers of a tensor are finite."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FEW = 1 << 15  # up to this many numbers numpy takes a third of torch's time, and only one thread


def finite(values: Tensor) -> bool:
    """Whether all numbers of a CPU tensor are finite."""
    if values.numel() > FEW:
        return bool(torch.isfinite(values).all())
    return bool(np.isfinite(values.detach().float().numpy()).all())
