"""p' = p - lr |p| / |u| u with u = m_hat / (sqrt(v_hat) + eps) + wd p, norms of each tensor: a step of LAMB.

Tensors lie one behind another in a flat buffer and are cut into chunks, none of which holds two. A first pass writes
moments, u and each chunk's sums of squares, a second one joins them, a third one steps.
"""

from __future__ import annotations

import torch

from goldsmith import assay

CHUNK = 16


@assay.case(N=[130], K=[4])
def tensors(make, N, K):
    return {
        "p": make.normal(N), "g": make.normal(N), "m": make.normal(N, std=0.3), "v": make.uniform(N),
        "begin": make.offsets(K, N, empty=0), "lr": 0.05, "b1": 0.9, "b2": 0.98, "eps": 1e-3, "wd": 0.1, "t": 4,
    }  # fmt: skip


@assay.case(N=[57], K=[3])
def few(make, N, K):
    return {**tensors[0].draw(make, N, K), "t": 2}


def golden(p, g, m, v, begin, lr, b1, b2, eps, wd, t):
    m_new = b1 * m + (1 - b1) * g
    v_new = b2 * v + (1 - b2) * g.square()
    u = assay.stage("u", m_new / (1 - b1**t) / (torch.sqrt(v_new / (1 - b2**t)) + eps) + wd * p)
    bounds = begin.tolist()
    trust = []
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        trust.append(torch.sqrt(p[lo:hi].square().sum()) / torch.sqrt(u[lo:hi].square().sum()))
    trust = assay.stage("trust", torch.stack(trust))
    return p - lr * trust.repeat_interleave(begin.diff()) * u, m_new, v_new


def cut(begin):
    """(tensor, first, last) of every chunk."""
    starts = [at for lo, hi in zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True) for at in range(lo, hi, CHUNK)]
    owners = torch.searchsorted(begin, torch.tensor(starts), right=True) - 1
    ends = begin[owners + 1].tolist()
    return [(owner, at, min(at + CHUNK, end)) for owner, at, end in zip(owners.tolist(), starts, ends, strict=True)]


def kernel(p, g, m, v, begin, lr, b1, b2, eps, wd, t):
    N, K = len(p), len(begin) - 1
    p_new, m_new, v_new, u = (torch.empty(N) for _ in range(4))
    chunks = cut(begin)
    of_p, of_u = torch.empty(len(chunks)), torch.empty(len(chunks))
    for number, (_, first, last) in enumerate(chunks):
        part = slice(first, last)
        m_part = b1 * m[part] + (1 - b1) * g[part]
        v_part = b2 * v[part] + (1 - b2) * g[part] * g[part]
        m_new[part], v_new[part] = m_part, v_part
        m_hat, v_hat = m_part / (1 - b1**t), v_part / (1 - b2**t)
        u[part] = m_hat / (torch.sqrt(v_hat) + eps) + wd * p[part]
        of_p[number] = (p[part] * p[part]).sum()
        of_u[number] = (u[part] * u[part]).sum()
    u = assay.stage("u", u)
    owners = torch.tensor([owner for owner, _, _ in chunks])
    norm_p = torch.zeros(K).index_add_(0, owners, of_p)
    norm_u = torch.zeros(K).index_add_(0, owners, of_u)
    trust = assay.stage("trust", torch.sqrt(norm_p) / torch.sqrt(norm_u))
    for owner, first, last in chunks:
        part = slice(first, last)
        p_new[part] = p[part] - lr * trust[owner] * u[part]
    return p_new, m_new, v_new


def target():
    return assay.Target(
        kernel, golden, cases=[tensors, few], name="lamb_step", outputs=("p_new", "m_new", "v_new"), backward=None
    )
