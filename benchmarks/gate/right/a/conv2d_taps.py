"""Right: nine products of shifted views, added one after another."""

import torch

PROBLEM = "a_conv2d"
STATUS = "accepted"


def candidate(x, w):
    height, width = x.shape[2] - 2, x.shape[3] - 2
    y = None
    for i in range(3):
        for j in range(3):
            part = torch.einsum("bchw,oc->bohw", x[:, :, i : i + height, j : j + width], w[:, :, i, j])
            y = part if y is None else y + part
    return y
