"""Right: one product with both weights side by side, then the halves."""

import torch
import torch.nn.functional as F

PROBLEM = "a_geglu"
STATUS = "accepted"


def candidate(x, w_gate, w_up):
    gate, up = (x @ torch.cat([w_gate, w_up], 1)).chunk(2, -1)
    return F.gelu(gate) * up
