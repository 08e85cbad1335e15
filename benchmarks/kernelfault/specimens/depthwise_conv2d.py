"""y[b, c, i, j] = bias[c] + sum_{u, v} x[b, c, s i - p + d u, s j - p + d v] w[c, u, v],  zeros outside of x.

Depthwise convolution of images in any memory format, with stride, padding and dilation. Triton, float32: a program has
a block of pixels of one plane. The weight's gradient is summed in two stages: a plane's pixels, then the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

PIXELS, TAPS = 32, 4


@assay.case(B=[2], C=[3], H=[9], W=[7], K=[3], stride=[2], padding=[1], dilation=[1])
def images(make, B, C, H, W, K, stride, padding, dilation):
    x = make.normal(B, H, W, C).permute(0, 3, 1, 2)  # channels last
    return {
        "x": x, "w": make.normal(C, K, K, std=0.5), "bias": make.normal(C), "stride": stride, "padding": padding,
        "dilation": dilation,
    }  # fmt: skip


@assay.case(B=[3], C=[2], H=[8], W=[10], K=[3], stride=[1], padding=[3], dilation=[2])
def dilated(make, B, C, H, W, K, stride, padding, dilation):
    return {**images[0].draw(make, B, C, H, W, K, stride, padding, dilation), "x": make.normal(B, C, H, W)}


def golden(x, w, bias, stride, padding, dilation):
    return torch.nn.functional.conv2d(x, w.unsqueeze(1), bias, stride, padding, dilation, groups=len(w))


@triton.jit
def _fwd_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, sxb, sxc, sxh, sxw, C, H, W, OH, OW, K, S, P, DIL,
                PIXELS: tl.constexpr):  # fmt: skip
    b, c = tl.program_id(0) // C, tl.program_id(0) % C
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    i, j = pixel // OW, pixel % OW
    x_ptr += b * sxb + c * sxc
    acc = tl.zeros([PIXELS], tl.float32) + tl.load(bias_ptr + c)
    for u in range(K):
        for v in range(K):
            h, w = i * S - P + u * DIL, j * S - P + v * DIL
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (pixel < OH * OW)
            x = tl.load(x_ptr + h * sxh + w * sxw, mask=inside, other=0.0)
            acc += x * tl.load(w_ptr + c * K * K + u * K + v)
    tl.store(y_ptr + (b * C + c) * OH * OW + pixel, acc, mask=pixel < OH * OW)


@triton.jit
def _bwd_x_kernel(g_ptr, w_ptr, dx_ptr, C, H, W, OH, OW, K, S, P, DIL, PIXELS: tl.constexpr):
    plane = tl.program_id(0)
    c = plane % C
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    h, w = pixel // W, pixel % W
    acc = tl.zeros([PIXELS], tl.float32)
    for u in range(K):
        for v in range(K):
            top, left = h + P - u * DIL, w + P - v * DIL
            i, j = top // S, left // S
            meets = (top >= 0) & (left >= 0) & (top % S == 0) & (left % S == 0)
            inside = meets & (i < OH) & (j < OW) & (pixel < H * W)
            g = tl.load(g_ptr + plane * OH * OW + i * OW + j, mask=inside, other=0.0)
            acc += g * tl.load(w_ptr + c * K * K + u * K + v)
    tl.store(dx_ptr + plane * H * W + pixel, acc, mask=pixel < H * W)


@triton.jit
def _bwd_w_kernel(g_ptr, x_ptr, part_ptr, sum_ptr, sxb, sxc, sxh, sxw, C, H, W, OH, OW, K, S, P, DIL,
                  PIXELS: tl.constexpr):  # fmt: skip
    plane, tap = tl.program_id(0), tl.program_id(1)
    b, c = plane // C, plane % C
    u, v = tap // K, tap % K
    x_ptr += b * sxb + c * sxc
    acc = tl.zeros([PIXELS], tl.float32)
    sums = tl.zeros([PIXELS], tl.float32)
    for start in range(0, OH * OW, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        h, w = pixel // OW * S - P + u * DIL, pixel % OW * S - P + v * DIL
        g = tl.load(g_ptr + plane * OH * OW + pixel, mask=pixel < OH * OW, other=0.0)
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (pixel < OH * OW)
        x = tl.load(x_ptr + h * sxh + w * sxw, mask=inside, other=0.0)
        acc += g * x
        sums += g
    tl.store(part_ptr + plane * K * K + tap, tl.sum(acc, 0))
    if tap == 0:
        tl.store(sum_ptr + plane, tl.sum(sums, 0))


@triton.jit
def _batch_sum_kernel(part_ptr, sum_ptr, dw_ptr, dbias_ptr, B, C, N, TAPS: tl.constexpr):
    c, block = tl.program_id(0), tl.program_id(1)
    tap = block * TAPS + tl.arange(0, TAPS)
    acc = tl.zeros([TAPS], tl.float32)
    total = 0.0
    for b in range(B):
        acc += tl.load(part_ptr + (b * C + c) * N + tap, mask=tap < N, other=0.0)
        total += tl.load(sum_ptr + b * C + c)
    tl.store(dw_ptr + c * N + tap, acc, mask=tap < N)
    if block == 0:
        tl.store(dbias_ptr + c, total)


class DepthwiseConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, stride, padding, dilation):
        B, C, H, W = x.shape
        K = w.shape[-1]
        w, bias = w.contiguous(), bias.contiguous()
        OH = (H + 2 * padding - dilation * (K - 1) - 1) // stride + 1
        OW = (W + 2 * padding - dilation * (K - 1) - 1) // stride + 1
        y = x.new_empty(B, C, OH, OW)
        _fwd_kernel[(B * C, triton.cdiv(OH * OW, PIXELS))](
            x, w, bias, y, *x.stride(), C, H, W, OH, OW, K, stride, padding, dilation, PIXELS
        )  # fmt: skip
        ctx.save_for_backward(x, w)
        ctx.geometry = K, stride, padding, dilation
        return y

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        B, C, H, W = x.shape
        OH, OW = g.shape[2:]
        K = ctx.geometry[0]
        g = g.contiguous()
        dx = x.new_empty(B, C, H, W)
        _bwd_x_kernel[(B * C, triton.cdiv(H * W, PIXELS))](g, w, dx, C, H, W, OH, OW, *ctx.geometry, PIXELS)
        part, sums = x.new_empty(B * C, K * K), x.new_empty(B * C)
        _bwd_w_kernel[(B * C, K * K)](g, x, part, sums, *x.stride(), C, H, W, OH, OW, *ctx.geometry, PIXELS)
        dw, dbias = torch.empty_like(w), w.new_empty(C)
        _batch_sum_kernel[(C, triton.cdiv(K * K, TAPS))](part, sums, dw, dbias, B, C, K * K, TAPS)
        return dx, dw, dbias, None, None, None


def kernel(x, w, bias, stride, padding, dilation):
    return DepthwiseConv2d.apply(x, w, bias, stride, padding, dilation)


def target():
    return assay.Target(kernel, golden, cases=[images, dilated], name="depthwise_conv2d", outputs=("y",))
