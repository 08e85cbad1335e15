"""y[s] = sum of the rows x[n] with segment[n] = s; S segments, of which some are empty."""

from goldsmith import assay


@assay.case(N=[25, 3], D=[6], S=[5])
def rows(make, N, D, S):
    return {"x": make.normal(N, D), "segment": make.integers(0, S, N), "S": S}


cases = rows


def golden(x, segment, S):
    return x.new_zeros(S, x.shape[1]).index_add(0, segment, x)
