"""y' = y + c (z - y) + r (b1 (1 - c) - 1) u,  z' = z - r u,  u = g / (sqrt(v' / (1 - b2^t)) + eps) + wd y.

A step of schedule-free AdamW: y are the weights that are trained, z those of the base optimiser, x' the average that is
evaluated; c is this step's share of the sum of weights lr^2. Gradients are clipped by their norm first. Triton,
float32: blocks' sums of squares, their norm, then the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, PARTS = 32, 4


@assay.case(N=[213])
def clipped(make, N):
    return {
        "y": make.normal(N), "z": make.normal(N), "v": make.uniform(N), "g": make.normal(N, std=3.0), "lr": 0.05,
        "b1": 0.9, "b2": 0.95, "eps": 1e-2, "wd": 0.1, "max_norm": 30.0, "t": 3, "warmup": 10, "weight_sum": 0.0031,
    }  # fmt: skip


@assay.case(N=[90])
def small(make, N):
    return {**clipped[0].draw(make, N), "g": make.normal(N, std=0.05), "t": 20, "weight_sum": 0.021}


def rates(lr, t, warmup, weight_sum):
    """(rate, c): the rate of this step, and its share of the average."""
    rate = lr * min(1.0, t / warmup)
    return rate, rate**2 / (weight_sum + rate**2)


def golden(y, z, v, g, lr, b1, b2, eps, wd, max_norm, t, warmup, weight_sum):
    norm = assay.stage("norm", torch.sqrt(g.square().sum()))
    g = g * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    rate = lr * min(1.0, t / warmup)
    c = rate**2 / (weight_sum + rate**2)
    v_new = b2 * v + (1 - b2) * g.square()
    u = g / (torch.sqrt(v_new / (1 - b2**t)) + eps) + wd * y
    y_new = y + c * (z - y) + rate * (b1 * (1 - c) - 1) * u
    z_new = z - rate * u
    return y_new, z_new, v_new, y_new + (1 - 1 / b1) * (z_new - y_new)


@triton.jit
def _square_kernel(g_ptr, part_ptr, N, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < N, other=0.0)
    tl.store(part_ptr + block, tl.sum(g * g, 0))


@triton.jit
def _norm_kernel(part_ptr, norm_ptr, blocks, PARTS: tl.constexpr):
    acc = tl.zeros([PARTS], tl.float32)
    for start in range(0, blocks, PARTS):
        at = start + tl.arange(0, PARTS)
        acc += tl.load(part_ptr + at, mask=at < blocks, other=0.0)
    tl.store(norm_ptr, tl.sqrt(tl.sum(acc, 0)))


@triton.jit
def _step_kernel(y_ptr, z_ptr, v_ptr, g_ptr, norm_ptr, y_new_ptr, z_new_ptr, v_new_ptr, x_new_ptr, N, rate, c, b1, b2,
                 correction, eps, wd, max_norm, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = at < N
    y = tl.load(y_ptr + at, mask=m, other=0.0)
    z = tl.load(z_ptr + at, mask=m, other=0.0)
    v = tl.load(v_ptr + at, mask=m, other=0.0)
    g = tl.load(g_ptr + at, mask=m, other=0.0)
    g *= tl.minimum(max_norm / (tl.load(norm_ptr) + 1e-6), 1.0)
    v_new = b2 * v + (1.0 - b2) * g * g
    u = g / (tl.sqrt(v_new / correction) + eps) + wd * y
    y_new = y + c * (z - y) + rate * (b1 * (1.0 - c) - 1.0) * u
    z_new = z - rate * u
    x_new = y_new + (1.0 - 1.0 / b1) * (z_new - y_new)
    tl.store(y_new_ptr + at, y_new, mask=m)
    tl.store(z_new_ptr + at, z_new, mask=m)
    tl.store(v_new_ptr + at, v_new, mask=m)
    tl.store(x_new_ptr + at, x_new, mask=m)


def kernel(y, z, v, g, lr, b1, b2, eps, wd, max_norm, t, warmup, weight_sum):
    y, z, v, g = y.contiguous(), z.contiguous(), v.contiguous(), g.contiguous()
    N = y.numel()
    blocks = triton.cdiv(N, BLOCK)
    part, norm = g.new_empty(blocks), g.new_empty(())
    _square_kernel[(blocks,)](g, part, N, BLOCK)
    _norm_kernel[(1,)](part, norm, blocks, PARTS)
    norm = assay.stage("norm", norm)
    rate, c = rates(lr, t, warmup, weight_sum)
    y_new, z_new, v_new, x_new = (torch.empty_like(y) for _ in range(4))
    _step_kernel[(blocks,)](
        y, z, v, g, norm, y_new, z_new, v_new, x_new, N, rate, c, b1, b2, 1 - b2**t, eps, wd, max_norm, BLOCK
    )  # fmt: skip
    return y_new, z_new, v_new, x_new


def target():
    return assay.Target(
        kernel, golden, cases=[clipped, small], name="schedule_free_step",
        outputs=("y_new", "z_new", "v_new", "x_new"), backward=None,
    )  # fmt: skip
