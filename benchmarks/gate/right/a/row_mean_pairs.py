"""Right: halves are added to each other until one column is left; an odd column is carried along."""

import torch

PROBLEM = "a_row_mean"
STATUS = "accepted"


def candidate(x):
    total = x
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        odd = total[:, 2 * half :]
        total = torch.cat([total[:, :half] + total[:, half : 2 * half], odd], 1)
    return total[:, 0] / x.shape[1]
