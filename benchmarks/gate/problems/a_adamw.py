"""A step of AdamW with decoupled weight decay: the new parameters and both moments."""

import torch

from goldsmith import assay


@assay.case(N=[70, 1])
def parameters(make, N):
    moments = {"m": make.normal(N, std=0.3), "v": 0.01 + make.uniform(N)}
    return {"p": make.normal(N), "g": make.normal(N), **moments, "lr": 0.01, "eps": 1e-4, "decay": 0.1, "step": 3}


cases = parameters
outputs = ("p_new", "m_new", "v_new")
backward = None


def golden(p, g, m, v, lr, eps, decay, step):
    m_new = 0.9 * m + 0.1 * g
    v_new = 0.99 * v + 0.01 * g.square()
    m_hat, v_hat = m_new / (1 - 0.9**step), v_new / (1 - 0.99**step)
    return p * (1 - lr * decay) - lr * m_hat / (torch.sqrt(v_hat) + eps), m_new, v_new
