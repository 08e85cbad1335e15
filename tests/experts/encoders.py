"""Encoders for the layouts of quantised checkpoints, one number at a time, as their authors document them."""

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def word(nibbles):
    """Eight numbers 0..15 packed into an int32, the first in the lowest bits."""
    bits = sum(int(n) << 4 * i for i, n in enumerate(nibbles))
    return bits - (1 << 32) if bits >> 31 else bits


def k2(q):
    """[out, in] numbers -8..7 -> weight_packed int32 [out, in / 8]: element 8j + i in bits 4i of word j, plus 8."""
    words = [[word(row[j : j + 8] + 8) for j in range(0, len(row), 8)] for row in np.asarray(q)]
    return torch.tensor(words, dtype=torch.int32)


def awq(q):
    """[lines, columns] numbers 0..15 -> int32 [lines, columns / 8]: bits 4i of word c hold column 8c + AWQ_ORDER[i]."""
    words = [[word(row[c : c + 8][list(AWQ_ORDER)]) for c in range(0, len(row), 8)] for row in np.asarray(q)]
    return torch.tensor(words, dtype=torch.int32)


def mxfp4(codes):
    """[out, in] codes 0..15 -> blocks uint8 [out, in / 32, 16], the low nibble first."""
    blocks = [
        [[int(block[2 * b]) | int(block[2 * b + 1]) << 4 for b in range(16)] for block in row.reshape(-1, 32)]
        for row in np.asarray(codes)
    ]
    return torch.tensor(blocks, dtype=torch.uint8)
