"""y = x @ w + b, forward only."""

from goldsmith import assay


@assay.case(T=[32, 7], K=[128], N=[48])
def tokens(make, T, K, N):
    return {"x": make.normal(T, K), "w": make.normal(K, N, std=0.05), "b": make.normal(N)}


cases = tokens
backward = None


def golden(x, w, b):
    return x @ w + b
