"""y[t, o] = sum over i of mix[t, o, i] * streams[t, i] + post[t, o] * out[t]."""

from goldsmith import assay


@assay.case(T=[5, 1], n=[4], D=[12])
def tokens(make, T, n, D):
    coefficients = {"mix": make.normal(T, n, n, std=0.5), "post": make.normal(T, n)}
    return {"streams": make.normal(T, n, D), "out": make.normal(T, D), **coefficients}


cases = tokens


def golden(streams, out, mix, post):
    return mix @ streams + post[..., None] * out[:, None]
