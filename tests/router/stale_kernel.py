"""The stale accumulator from public code: only the autotuner clears the buffer to which the kernel adds.

Triton resets the named arguments only while it tunes, not when it uses a cached configuration. From the second call
with the same key on, the kernel adds gradients to the uninitialised memory of torch.empty.
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay
from router.wrong_routers import float32_sums, golden, logits


@triton.autotune([triton.Config({}, num_warps=w) for w in (1, 2)], key=["k", "s"], reset_to_zero=["dx_ptr", "dy_ptr"])
@triton.jit
def _scatter(g_ptr, index_ptr, dx_ptr, dy_ptr, k, s, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    g, index = tl.load(g_ptr + row * k + at, at < k, 0.0), tl.load(index_ptr + row * k + at, at < k, 0)
    tl.atomic_add(dx_ptr + row * s + index // s, g, at < k)
    tl.atomic_add(dy_ptr + row * s + index % s, g, at < k)


def backward(x, y, k, index, grad_scores):
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    _scatter[(len(x),)](grad_scores.contiguous(), index.contiguous(), dx, dy, k, x.shape[1], triton.next_power_of_2(k))
    return {"x": dx, "y": dy}


TARGET = assay.Target(
    float32_sums, golden, cases=logits, outputs=("scores", "index"), backward=backward, dtypes=(torch.float32,),
    decisions={"index": assay.topk(scores="sums", k="k")},
)  # fmt: skip
