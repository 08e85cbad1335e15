"""y[t] = x[0] + ... + x[t] along the first axis."""

from goldsmith import assay


@assay.case(T=[30, 1], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


cases = rows


def golden(x):
    return x.cumsum(0)
