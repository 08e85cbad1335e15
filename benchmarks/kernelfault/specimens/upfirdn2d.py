"""y = gain (f * up(x))[::down],  up(x) = x with up - 1 zeros after each pixel, then `before` and `after` zeros around.

The resampling of style-based generators: zeros are put between pixels, the image is padded, convolved with a learned
filter f (flipped, as a true convolution is) and every `down`-th pixel is kept. Triton, float32: a program per block of
output pixels of one channel, with a loop over taps of which only those on real pixels count. The backward has a
kernel for the image, by input pixel, and one for the filter, by tap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 32


@assay.case(B=[2], C=[1], H=[3], W=[4], KH=[2], KW=[3])
def upward(make, B, C, H, W, KH, KW):
    return {
        "x": make.normal(B, C, H, W), "f": make.normal(KH, KW), "up": 2, "down": 1, "before": 2, "after": 1,
        "gain": 4.0,
    }  # fmt: skip


@assay.case(B=[1], C=[2], H=[4], W=[5], KH=[3], KW=[2])
def downward(make, B, C, H, W, KH, KW):
    x = make.normal(B, H, W, C).permute(0, 3, 1, 2)
    return {"x": x, "f": make.normal(KH, KW), "up": 1, "down": 2, "before": 1, "after": 2, "gain": 1.0}


@assay.case(B=[1], C=[1], H=[3], W=[4], KH=[3], KW=[2])
def both(make, B, C, H, W, KH, KW):
    f = make.normal(KW, KH).T
    return {"x": make.normal(B, C, H, W), "f": f, "up": 3, "down": 2, "before": 0, "after": 1, "gain": 9.0}


def golden(x, f, up, down, before, after, gain):
    B, C, H, W = x.shape
    wide = x.new_zeros(B, C, H, up, W, up)
    wide[:, :, :, 0, :, 0] = x
    wide = torch.nn.functional.pad(wide.reshape(B, C, H * up, W * up), (before, after, before, after))
    rows, columns = wide.shape[2] - f.shape[0] + 1, wide.shape[3] - f.shape[1] + 1
    y = 0
    for a in range(f.shape[0]):
        for b in range(f.shape[1]):
            y = y + f[-1 - a, -1 - b] * wide[:, :, a : a + rows : down, b : b + columns : down]
    return gain * y


def out_size(size, taps, up, down, before, after):
    return (size * up + before + after - taps) // down + 1


# n image and channel, i j input pixel, r c output pixel, a b tap
@triton.jit
def _fwd_kernel(x_ptr, f_ptr, y_ptr, H, W, R, C, KH, KW, up, down, before, gain, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = at < R * C
    r, c = at // C, at % C
    acc = tl.zeros([BLOCK], tl.float32)
    for a in range(0, KH):
        u = r * down + a - before
        for b in range(0, KW):
            v = c * down + b - before
            real = m & (u >= 0) & (v >= 0) & (u % up == 0) & (v % up == 0) & (u < H * up) & (v < W * up)
            x = tl.load(x_ptr + (n * H + u // up) * W + v // up, mask=real, other=0.0)
            acc += x * tl.load(f_ptr + (KH - 1 - a) * KW + KW - 1 - b)
    tl.store(y_ptr + n * R * C + at, acc * gain, mask=m)


@triton.jit
def _bwd_image_kernel(g_ptr, f_ptr, dx_ptr, H, W, R, C, KH, KW, up, down, before, gain, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = at < H * W
    i, j = at // W, at % W
    acc = tl.zeros([BLOCK], tl.float32)
    for a in range(0, KH):
        u = i * up + before - a
        for b in range(0, KW):
            v = j * up + before - b
            real = m & (u >= 0) & (v >= 0) & (u % down == 0) & (v % down == 0)
            real = real & (u // down < R) & (v // down < C)
            g = tl.load(g_ptr + (n * R + u // down) * C + v // down, mask=real, other=0.0)
            acc += g * tl.load(f_ptr + (KH - 1 - a) * KW + KW - 1 - b)
    tl.store(dx_ptr + n * H * W + at, acc * gain, mask=m)


@triton.jit
def _bwd_filter_kernel(g_ptr, x_ptr, df_ptr, images, H, W, R, C, KH, KW, up, down, before, gain, BLOCK: tl.constexpr):
    a, b = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, images * R * C, BLOCK):
        at = first + tl.arange(0, BLOCK)
        m = at < images * R * C
        n, r, c = at // (R * C), at // C % R, at % C
        u, v = r * down + a - before, c * down + b - before
        real = m & (u >= 0) & (v >= 0) & (u % up == 0) & (v % up == 0) & (u < H * up) & (v < W * up)
        x = tl.load(x_ptr + (n * H + u // up) * W + v // up, mask=real, other=0.0)
        acc += x * tl.load(g_ptr + at, mask=m, other=0.0)
    tl.store(df_ptr + (KH - 1 - a) * KW + KW - 1 - b, tl.sum(acc) * gain)


class UpFirDn2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, up, down, before, after, gain):
        x, f = x.contiguous(), f.contiguous()
        (B, channels, H, W), (KH, KW) = x.shape, f.shape
        R, C = (out_size(*sizes, up, down, before, after) for sizes in ((H, KH), (W, KW)))
        y = x.new_empty(B, channels, R, C)
        sizes = H, W, R, C, KH, KW, up, down, before, gain
        _fwd_kernel[(B * channels, triton.cdiv(R * C, BLOCK))](x, f, y, *sizes, BLOCK)
        ctx.save_for_backward(x, f)
        ctx.sizes = sizes
        return y

    @staticmethod
    def backward(ctx, g):
        x, f = ctx.saved_tensors
        g, images = g.contiguous(), x.shape[0] * x.shape[1]
        dx, df = torch.empty_like(x), torch.empty_like(f)
        grid = (images, triton.cdiv(x.shape[2] * x.shape[3], BLOCK))
        _bwd_image_kernel[grid](g, f, dx, *ctx.sizes, BLOCK)
        _bwd_filter_kernel[f.shape](g, x, df, images, *ctx.sizes, BLOCK)
        return dx, df, None, None, None, None, None


def kernel(x, f, up, down, before, after, gain):
    return UpFirDn2d.apply(x, f, up, down, before, after, gain)


def target():
    return assay.Target(kernel, golden, cases=[upward, downward, both], name="upfirdn2d", outputs=("y",))
