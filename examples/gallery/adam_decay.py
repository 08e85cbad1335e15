"""A step of Adam on one flat buffer, in Triton. The weights decay as in AdamW: the moments do not see the decay.

After https://github.com/flagos-ai/FlagGems/issues/4988 (truong-v, 2026).
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay


# P parameters
@triton.jit
def _adam(w_ptr, grad_ptr, m_ptr, v_ptr, new_w_ptr, new_m_ptr, new_v_ptr, P, lr, decay, beta1, beta2, c1, c2, eps,
          BLOCK: tl.constexpr):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + p, p < P, 0.0)
    grad = tl.load(grad_ptr + p, p < P, 0.0)
    m = beta1 * tl.load(m_ptr + p, p < P, 0.0) + (1 - beta1) * grad
    v = beta2 * tl.load(v_ptr + p, p < P, 0.0) + (1 - beta2) * grad * grad
    update = m / c1 / (tl.sqrt(v / c2) + eps)
    tl.store(new_w_ptr + p, w - lr * (update + decay * w), p < P)
    tl.store(new_m_ptr + p, m, p < P)
    tl.store(new_v_ptr + p, v, p < P)


def adam(w, grad, m, v, step, lr, decay, beta1, beta2, eps):
    w, grad, m, v = (t.contiguous() for t in (w, grad, m, v))
    new = [torch.empty_like(t) for t in (w, m, v)]
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    grid = (triton.cdiv(len(w), 16),)
    _adam[grid](w, grad, m, v, *new, len(w), lr, decay, beta1, beta2, c1, c2, eps, BLOCK=16)
    return tuple(new)


def golden(w, grad, m, v, step, lr, decay, beta1, beta2, eps):
    grad = grad + decay * w
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad.square()
    update = m / (1 - beta1**step) / (torch.sqrt(v / (1 - beta2**step)) + eps)
    return w - lr * update, m, v


@assay.case(P=[21], decay=[0.0, 0.1])
def buffers(make, P, decay):
    return {
        "w": make.normal(P), "grad": make.normal(P), "m": make.normal(P, std=0.1), "v": 0.01 + make.uniform(P) / 4,
        "step": 3, "lr": 0.05, "decay": decay, "beta1": 0.875, "beta2": 0.96875, "eps": 1e-6,
    }  # fmt: skip


target = assay.Target(
    adam, golden, cases=buffers, backward=None, outputs=("new_w", "new_m", "new_v"), name="adam_decay"
)
