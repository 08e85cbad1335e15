"""y[b, o] = sum over c, i, j of w[o, c, i, j] * x[b, c], shifted by (i, j), without padding."""

import torch

from goldsmith import assay


@assay.case(B=[2], C=[3], O=[4], size=[8, 5])
def images(make, B, C, O, size):
    return {"x": make.normal(B, C, size, size + 1), "w": make.normal(O, C, 3, 3, std=0.3)}


cases = images


def golden(x, w):
    patches = x.unfold(2, 3, 1).unfold(3, 3, 1)
    return torch.einsum("bchwij,ocij->bohw", patches, w)
