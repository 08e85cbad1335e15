"""Right: the weight is read in blocks of 16 rows through numpy, and each block is scaled before it is used."""

import numpy as np
import torch

PROBLEM = "a_int8_linear"
STATUS = "accepted"


def candidate(x, w, scale):
    left, right, factor = x.numpy(), w.numpy(), scale.numpy()
    y = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for k in range(0, left.shape[1], 16):
        y += left[:, k : k + 16] @ (right[k : k + 16].astype(np.float32) * factor)
    return torch.from_numpy(y)
