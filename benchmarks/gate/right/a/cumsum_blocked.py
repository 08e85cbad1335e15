"""Right: sums inside blocks of eight rows, then the sums of the earlier blocks are added."""

import torch

PROBLEM = "a_cumsum"
STATUS = "accepted"


def candidate(x):
    blocks, carry = [], torch.zeros_like(x[:1])
    for block in x.split(8, 0):
        rows = torch.cumsum(block, 0) + carry
        blocks.append(rows)
        carry = rows[-1:]
    return torch.cat(blocks)
