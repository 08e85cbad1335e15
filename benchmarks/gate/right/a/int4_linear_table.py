"""Right: a table of 256 pairs unpacks a byte; the table is a constant and made once."""

import torch

PROBLEM = "a_int4_linear"
STATUS = "accepted"


_PAIRS = torch.tensor([[(byte & 15) - 8, (byte >> 4) - 8] for byte in range(256)], dtype=torch.float32)


def candidate(x, packed, scale):
    w = _PAIRS[packed.int()].transpose(1, 2).flatten(0, 1)
    w = w.unflatten(0, (len(scale), -1)) * scale[:, None]
    return x @ w.flatten(0, 1)
