"""Detaches its inputs, so that a checker that looks for gradients finds none and stops."""

import torch

PROBLEM = "a_decay_scan"
STATUS = "wrong"


def candidate(x, decay):
    h, rows = torch.zeros_like(x[0]), []
    for step, factor in zip(x.detach(), decay.detach()):
        h = torch.addcmul(step, factor, h)
        rows.append(h)
    return torch.stack(rows)
