"""y[s] = sum_n frames[n, s - n hop] window[s - n hop] / sum_n window[s - n hop]^2: frames put together.

Forward and backward in Triton, float32. A program of the forward has a block of samples and goes over the frames
that may reach it; one of the backward has a block of a frame, and the window's gradient is summed from a workspace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(N=[5], L=[10], hop=[4])
def frames(make, N, L, hop):
    return {"frames": make.normal(N, L), "window": 0.5 + make.uniform(L), "hop": hop}


@assay.case(N=[3], L=[11], hop=[3])
def short(make, N, L, hop):
    return frames[0].draw(make, N, L, hop)


def golden(frames, window, hop):
    N, L = frames.shape
    place = (torch.arange(N).unsqueeze(1) * hop + torch.arange(L)).flatten()
    empty = frames.new_zeros((N - 1) * hop + L)
    norm = empty.index_add(0, place, (window * window).expand(N, L).flatten())
    return empty.index_add(0, place, (frames * window).flatten()) / norm, norm


@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, norm_ptr, N, L, S, hop, REACH, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc, norm = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for back in range(0, REACH):
        n = s // hop - back
        at = s - n * hop
        inside = (n >= 0) & (n < N) & (at < L) & (s < S)
        w = tl.load(w_ptr + at, mask=inside, other=0.0)
        x = tl.load(x_ptr + n * L + at, mask=inside, other=0.0)
        acc += x * w
        norm += w * w
    tl.store(y_ptr + s, acc / norm, mask=s < S)
    tl.store(norm_ptr + s, norm, mask=s < S)


@triton.jit
def _backward(g_ptr, x_ptr, w_ptr, y_ptr, norm_ptr, dx_ptr, part_ptr, L, hop, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < L
    s = n * hop + at
    w, x = tl.load(w_ptr + at, mask=inside, other=0.0), tl.load(x_ptr + n * L + at, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + s, mask=inside, other=1.0)
    dz = tl.load(g_ptr + s, mask=inside, other=0.0) / norm
    y = tl.load(y_ptr + s, mask=inside, other=0.0)
    tl.store(dx_ptr + n * L + at, dz * w, mask=inside)
    tl.store(part_ptr + n * L + at, dz * (x - 2 * w * y), mask=inside)


class OverlapAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, frames, window, hop):
        frames, window = frames.contiguous(), window.contiguous()
        N, L = frames.shape
        S = (N - 1) * hop + L
        y, norm = frames.new_empty(S), frames.new_empty(S)
        reach = triton.cdiv(L, hop)
        _forward[(triton.cdiv(S, BLOCK),)](frames, window, y, norm, N, L, S, hop, reach, BLOCK)
        ctx.save_for_backward(frames, window, y, norm)
        ctx.hop = hop
        ctx.mark_non_differentiable(norm)
        return y, norm

    @staticmethod
    def backward(ctx, grad_y, _):
        frames, window, y, norm = ctx.saved_tensors
        N, L = frames.shape
        dx, part = torch.empty_like(frames), torch.empty_like(frames)
        g = grad_y.contiguous()
        _backward[(N, triton.cdiv(L, BLOCK))](g, frames, window, y, norm, dx, part, L, ctx.hop, BLOCK)
        return dx, part.sum(0), None


def kernel(frames, window, hop):
    return OverlapAdd.apply(frames, window, hop)


def target():
    return assay.Target(
        kernel, golden, cases=[frames, short], name="overlap_add", outputs=("y", "norm"), saved=("norm",)
    )  # fmt: skip
