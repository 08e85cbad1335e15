"""y = mean over windows of length 3 with stride 2 along the last axis."""

from goldsmith import assay


@assay.case(B=[4], L=[16, 3])
def signals(make, B, L):
    return {"x": make.normal(B, L)}


cases = signals


def golden(x):
    return x.unfold(-1, 3, 2).mean(-1)
