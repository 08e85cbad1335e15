"""Adds blocks of 64 numbers in float16 and only the blocks' sums in float32."""

import torch

PROBLEM = "a_row_mean"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x):
    blocks = [block.half().cumsum(-1, dtype=torch.float16)[:, -1].float() for block in x.split(64, -1)]
    return sum(blocks) / x.shape[1]
