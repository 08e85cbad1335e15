"""y = mean(x) over rows of thousands of numbers in [0, 1), forward only."""

from goldsmith import assay


@assay.case(T=[4], D=[8192, 3000])
def rows(make, T, D):
    return {"x": make.uniform(T, D)}


cases = rows
backward = None


def golden(x):
    return x.mean(-1)
