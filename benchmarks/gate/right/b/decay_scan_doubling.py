"""Right: pairs (decay, x) are combined over distances 1, 2, 4, ..., each step in new memory."""

import torch

PROBLEM = "a_decay_scan"
STATUS = "accepted"


def candidate(x, decay):
    distance = 1
    while distance < len(x):
        h = torch.addcmul(x[distance:], decay[distance:], x[:-distance])
        product = decay[distance:] * decay[:-distance]
        x = torch.cat([x[:distance], h])
        decay = torch.cat([decay[:distance], product])
        distance *= 2
    return x * 1
