"""y[t] = max(x[0], ..., x[t]) along the last axis."""

from goldsmith import assay


@assay.case(B=[5], T=[17, 1])
def rows(make, B, T):
    return {"x": make.normal(B, T)}


cases = rows


def golden(x):
    return x.cummax(-1).values
