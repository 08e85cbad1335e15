"""Right: pairs of a maximum and a sum are merged in a tree of halves."""

import torch

PROBLEM = "b_wide_logsumexp"
STATUS = "accepted"


def candidate(x):
    top, total = x, torch.ones_like(x)
    while top.shape[1] > 1:
        if top.shape[1] % 2:
            top = torch.nn.functional.pad(top, (0, 1), value=-torch.inf)
            total = torch.nn.functional.pad(total, (0, 1))
        new = torch.maximum(top[:, ::2], top[:, 1::2])
        parts = total * torch.exp(top - new.repeat_interleave(2, 1)).nan_to_num(0.0)
        top, total = new, parts[:, ::2] + parts[:, 1::2]
    return top[:, 0] + total[:, 0].log()
