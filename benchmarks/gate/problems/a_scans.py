"""The exclusive and the inclusive prefix sums of x, forward only."""

from goldsmith import assay


@assay.case(N=[40, 1])
def numbers(make, N):
    return {"x": make.normal(N)}


cases = numbers
outputs = ("exclusive", "inclusive")
backward = None


def golden(x):
    inclusive = x.cumsum(0)
    return inclusive - x, inclusive
