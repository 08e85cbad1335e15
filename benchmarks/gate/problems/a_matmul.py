"""y = a @ b."""

from goldsmith import assay


@assay.case(M=[16, 5], K=[48, 19], N=[24])
def sizes(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


cases = sizes


def golden(a, b):
    return a @ b
