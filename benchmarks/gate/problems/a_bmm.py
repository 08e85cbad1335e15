"""y[b] = x[b] @ w[b]."""

from goldsmith import assay


@assay.case(B=[3, 1], M=[6], K=[17], N=[8])
def batches(make, B, M, K, N):
    return {"x": make.normal(B, M, K), "w": make.normal(B, K, N)}


cases = batches


def golden(x, w):
    return x @ w
