"""Right: a Triton program for each query walks over blocks of 32 keys with a running maximum."""

import torch
import triton
import triton.language as tl

PROBLEM = "b_sharp_attention"
STATUS = "accepted"


@triton.jit
def _attention_kernel(q_ptr, k_ptr, v_ptr, y_ptr, S, D, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + row * D + d, mask=d < D, other=0.0)
    top, total = -float("inf"), 0.0
    y = tl.zeros([WIDTH], tl.float32)
    for start in range(0, S, KEYS):
        s = start + tl.arange(0, KEYS)
        at = s[:, None] * D + d
        inside = (s[:, None] < S) & (d < D)
        score = tl.sum(tl.load(k_ptr + at, mask=inside, other=0.0) * q, 1)
        score = tl.where(s < S, score, -float("inf"))
        new = tl.maximum(top, tl.max(score, 0))
        e = tl.exp(score - new)
        total = total * tl.exp(top - new) + tl.sum(e, 0)
        y = y * tl.exp(top - new) + tl.sum(e[:, None] * tl.load(v_ptr + at, mask=inside, other=0.0), 0)
        top = new
    tl.store(y_ptr + row * D + d, y / total, mask=d < D)


def candidate(q, k, v):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    y = torch.empty_like(q)
    width = triton.next_power_of_2(q.shape[1])
    _attention_kernel[(len(q),)](q, k, v, y, len(k), q.shape[1], KEYS=32, WIDTH=width)
    return y
