"""y = relu(x)^2."""

from goldsmith import assay


@assay.case(T=[6, 1], D=[32, 45])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


cases = rows


def golden(x):
    return x.relu().square()
