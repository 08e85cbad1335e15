"""h[t] = decay[t] * h[t - 1] + x[t], from h[-1] = 0."""

import torch

from goldsmith import assay


@assay.case(T=[20, 1], D=[6])
def steps(make, T, D):
    return {"x": make.normal(T, D), "decay": 0.2 + 0.75 * make.uniform(T, D)}


cases = steps


def golden(x, decay):
    h, rows = torch.zeros_like(x[0]), []
    for t in range(len(x)):
        h = decay[t] * h + x[t]
        rows.append(h)
    return torch.stack(rows)
