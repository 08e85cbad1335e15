"""y[t] = table[index[t]]; the gradient of a row is the sum over its uses."""

from goldsmith import assay


@assay.case(T=[20, 1], V=[9], D=[6])
def tokens(make, T, V, D):
    return {"table": make.normal(V, D), "index": make.integers(0, V, T)}


cases = tokens


def golden(table, index):
    return table[index]
