"""Right: torch's average pooling on a view with a channel axis."""

import torch.nn.functional as F

PROBLEM = "a_pool"
STATUS = "accepted"


def candidate(x):
    return F.avg_pool1d(x[:, None], 3, 2)[:, 0]
