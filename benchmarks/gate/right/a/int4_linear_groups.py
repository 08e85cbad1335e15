"""Right: one product a group with whole numbers, scaled by the group's scale and added up."""

import torch

PROBLEM = "a_int4_linear"
STATUS = "accepted"


def candidate(x, packed, scale):
    rows = 2 * len(packed) // len(scale)
    y = torch.zeros(len(x), packed.shape[1])
    for g in range(len(scale)):
        part = packed[g * rows // 2 : (g + 1) * rows // 2]
        columns = x[:, g * rows : (g + 1) * rows]
        sums = columns[:, 0::2] @ ((part & 15).float() - 8) + columns[:, 1::2] @ ((part >> 4).float() - 8)
        y.addcmul_(sums, scale[g])
    return y
