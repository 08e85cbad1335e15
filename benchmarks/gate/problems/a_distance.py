"""y[m, n] = sum over d of (x[m, d] - z[n, d])^2."""

from goldsmith import assay


@assay.case(M=[7], N=[5], D=[18, 2])
def rows(make, M, N, D):
    return {"x": make.normal(M, D), "z": make.normal(N, D)}


cases = rows


def golden(x, z):
    return (x[:, None] - z).square().sum(-1)
