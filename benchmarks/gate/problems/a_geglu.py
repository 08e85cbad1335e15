"""y = gelu(x @ w_gate) * (x @ w_up), with the exact gelu."""

import torch

from goldsmith import assay


@assay.case(T=[7], D=[16], N=[20, 9])
def tokens(make, T, D, N):
    return {"x": make.normal(T, D), "w_gate": make.normal(D, N, std=0.3), "w_up": make.normal(D, N, std=0.3)}


cases = tokens


def golden(x, w_gate, w_up):
    gate = x @ w_gate
    return 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * (x @ w_up)
