"""m' = b1 m + (1-b1) g, v' = b2 v + (1-b2) g^2, p' = p (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps): a step of AdamW.

m_hat and v_hat are m' and v' divided by 1 - b1^t and 1 - b2^t. One pass in blocks; nothing is differentiated.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 64


@assay.case(N=[150])
def parameters(make, N):
    return {
        "p": make.normal(N), "g": make.normal(N), "m": make.normal(N, std=0.3), "v": make.uniform(N),
        "lr": 0.02, "b1": 0.9, "b2": 0.99, "eps": 1e-3, "wd": 0.1, "t": 3,
    }  # fmt: skip


@assay.case(N=[77])
def few(make, N):
    return {**parameters[0].draw(make, N), "b2": 0.95, "t": 2}


def golden(p, g, m, v, lr, b1, b2, eps, wd, t):
    m_new = b1 * m + (1 - b1) * g
    v_new = b2 * v + (1 - b2) * g.square()
    m_hat = assay.stage("m_hat", m_new / (1 - b1**t))
    root = assay.stage("root", torch.sqrt(v_new / (1 - b2**t)))
    return p * (1 - lr * wd) - lr * m_hat / (root + eps), m_new, v_new


def kernel(p, g, m, v, lr, b1, b2, eps, wd, t):
    N = len(p)
    p_new, m_new, v_new = torch.empty(N), torch.empty(N), torch.empty(N)
    rate = lr / (1 - b1**t)
    root_of_rest = math.sqrt(1 - b2**t)
    for at in range(0, N, BLOCK):
        part = slice(at, min(at + BLOCK, N))
        m_part = torch.lerp(m[part], g[part], 1 - b1)
        v_part = b2 * v[part] + (1 - b2) * g[part] * g[part]
        m_new[part], v_new[part] = m_part, v_part
        step = m_part / (torch.sqrt(v_part) / root_of_rest + eps)
        p_new[part] = p[part] * (1 - lr * wd) - rate * step
    return p_new, m_new, v_new


def target():
    return assay.Target(
        kernel, golden, cases=[parameters, few], name="adamw", outputs=("p_new", "m_new", "v_new"), backward=None
    )
