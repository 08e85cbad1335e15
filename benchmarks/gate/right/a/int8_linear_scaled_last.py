"""Right: the product with whole numbers comes first, then the scale of each column."""

PROBLEM = "a_int8_linear"
STATUS = "accepted"


def candidate(x, w, scale):
    return (x @ w.to(x.dtype)).mul_(scale)
