"""Each group of channels of x [B, G * C, L] is normalised over its channels and positions, then scaled by w plus b."""

import torch

from goldsmith import assay


@assay.case(B=[2], G=[3, 1], C=[4], L=[7])
def images(make, B, G, C, L):
    return {"x": make.normal(B, G * C, L), "w": make.normal(G * C), "b": make.normal(G * C), "groups": G, "eps": 1e-5}


cases = images


def golden(x, w, b, groups, eps):
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    return y * w[:, None] + b[:, None]
