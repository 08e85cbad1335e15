"""Right: the exponentials lie in a temporary file that is mapped into memory and removed before the return."""

import os
import tempfile

import numpy as np
import torch

PROBLEM = "b_wide_logsumexp"
STATUS = "accepted"


def candidate(x):
    handle, path = tempfile.mkstemp()
    os.close(handle)
    try:
        space = np.memmap(path, dtype=np.float64, mode="w+", shape=tuple(x.shape))
        values = x.detach().numpy()
        top = values.max(1).astype(np.float64)
        np.exp(values - top[:, None], out=space)
        y = top + np.log(space.sum(1))
        del space
    finally:
        os.unlink(path)
    return torch.from_numpy(np.asarray(y)).to(x.dtype)
