"""Right: a Triton kernel takes the stride of every input, so that slices with steps need no copy."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_momentum"
STATUS = "accepted"


@triton.jit
def _step_kernel(p_ptr, g_ptr, v_ptr, q_ptr, u_ptr, p_step, g_step, v_step, N, lr, mu, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    g = tl.load(g_ptr + n * g_step, mask=inside)
    v = mu * tl.load(v_ptr + n * v_step, mask=inside) + g
    tl.store(q_ptr + n, tl.load(p_ptr + n * p_step, mask=inside) - lr * (g + mu * v), mask=inside)
    tl.store(u_ptr + n, v, mask=inside)


def candidate(p, g, velocity, lr, mu):
    p_new, v_new = (torch.empty(len(p), device=p.device, dtype=p.dtype) for _ in range(2))
    steps = p.stride(0), g.stride(0), velocity.stride(0)
    _step_kernel[(triton.cdiv(len(p), 32),)](p, g, velocity, p_new, v_new, *steps, len(p), lr, mu, BLOCK=32)
    return p_new, v_new
