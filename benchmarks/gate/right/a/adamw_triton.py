"""Right: one Triton pass over the parameters, with the corrections computed on the host."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_adamw"
STATUS = "accepted"


@triton.jit
def _adamw_kernel(p_ptr, g_ptr, m_ptr, v_ptr, p2_ptr, m2_ptr, v2_ptr, n, keep, rate, c2, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(g_ptr + i, mask=inside)
    m = 0.9 * tl.load(m_ptr + i, mask=inside) + 0.1 * g
    v = 0.99 * tl.load(v_ptr + i, mask=inside) + 0.01 * g * g
    p = tl.load(p_ptr + i, mask=inside) * keep - rate * m / (tl.sqrt(v / c2) + eps)
    tl.store(p2_ptr + i, p, mask=inside)
    tl.store(m2_ptr + i, m, mask=inside)
    tl.store(v2_ptr + i, v, mask=inside)


def candidate(p, g, m, v, lr, eps, decay, step):
    p, g, m, v = (t.contiguous() for t in (p, g, m, v))
    results = tuple(torch.empty_like(p) for _ in range(3))
    n = p.numel()
    keep, rate, c2 = 1 - lr * decay, lr / (1 - 0.9**step), 1 - 0.99**step
    _adamw_kernel[(triton.cdiv(n, 32),)](p, g, m, v, *results, n, keep, rate, c2, eps, BLOCK=32)
    return results
