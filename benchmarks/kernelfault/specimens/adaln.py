"""r = x + gate f, y = LN(r) (1 + scale) + shift: a gated residual and the next norm, as diffusion transformers do.

mod holds shift, scale and gate of each batch side by side. Forward and backward in Triton, float32: a program of the
forward has a token, one of the backward some tokens of a batch, whose sums for mod it leaves in a workspace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

TOKENS = 2


@assay.case(B=[2], T=[5], D=[6])
def images(make, B, T, D):
    return {"x": make.normal(B, T, D), "f": make.normal(B, T, D), "mod": make.normal(B, 3 * D, std=0.7), "eps": 1e-6}


@assay.case(B=[3], T=[2], D=[11])
def few(make, B, T, D):
    return images[0].draw(make, B, T, D)


@assay.case(B=[2], T=[7], D=[3])
def narrow(make, B, T, D):
    return images[0].draw(make, B, T, D)


def golden(x, f, mod, eps):
    shift, scale, gate = mod.unsqueeze(1).chunk(3, 2)
    r = x + gate * f
    centred = r - r.mean(2, keepdim=True)
    x_hat = centred * torch.rsqrt(centred.square().mean(2, keepdim=True) + eps)
    return r, x_hat * (1 + scale) + shift


@triton.jit
def _forward(x_ptr, f_ptr, mod_ptr, r_ptr, y_ptr, hat_ptr, inv_ptr, T, D, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    batch = token // T
    d = tl.arange(0, BLOCK)
    inside = d < D
    mod = mod_ptr + batch * 3 * D + d
    shift, scale = tl.load(mod, mask=inside, other=0.0), tl.load(mod + D, mask=inside, other=0.0)
    gate = tl.load(mod + 2 * D, mask=inside, other=0.0)
    f = tl.load(f_ptr + token * D + d, mask=inside, other=0.0)
    r = tl.load(x_ptr + token * D + d, mask=inside, other=0.0) + gate * f
    centred = tl.where(inside, r - tl.sum(r) / D, 0.0)
    inv = 1.0 / tl.sqrt(tl.sum(centred * centred) / D + eps)
    x_hat = centred * inv
    tl.store(r_ptr + token * D + d, r, mask=inside)
    tl.store(hat_ptr + token * D + d, x_hat, mask=inside)
    tl.store(inv_ptr + token, inv)
    tl.store(y_ptr + token * D + d, x_hat * (1.0 + scale) + shift, mask=inside)


@triton.jit
def _backward(gr_ptr, gy_ptr, f_ptr, mod_ptr, hat_ptr, inv_ptr, dx_ptr, df_ptr, part_ptr, T, D, BLOCKS,
              TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    batch, block = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    mod = mod_ptr + batch * 3 * D + d
    scale, gate = tl.load(mod + D, mask=inside, other=0.0), tl.load(mod + 2 * D, mask=inside, other=0.0)
    dshift, dscale = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dgate = tl.zeros([BLOCK], tl.float32)
    for t in range(block * TOKENS, min((block + 1) * TOKENS, T)):
        at = (batch * T + t) * D + d
        gr, gy = tl.load(gr_ptr + at, mask=inside, other=0.0), tl.load(gy_ptr + at, mask=inside, other=0.0)
        x_hat, f = tl.load(hat_ptr + at, mask=inside, other=0.0), tl.load(f_ptr + at, mask=inside, other=0.0)
        inv = tl.load(inv_ptr + batch * T + t)
        dhat = gy * (1.0 + scale)
        dr = gr + inv * (dhat - tl.sum(dhat) / D - x_hat * (tl.sum(dhat * x_hat) / D))
        tl.store(dx_ptr + at, dr, mask=inside)
        tl.store(df_ptr + at, dr * gate, mask=inside)
        dshift += gy
        dscale += gy * x_hat
        dgate += dr * f
    part = part_ptr + (batch * BLOCKS + block) * 3 * D + d
    tl.store(part, dshift, mask=inside)
    tl.store(part + D, dscale, mask=inside)
    tl.store(part + 2 * D, dgate, mask=inside)


class AdaLN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, mod, eps):
        x, f, mod = x.contiguous(), f.contiguous(), mod.contiguous()
        B, T, D = x.shape
        r, y, hat, inv = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), x.new_empty(B, T)
        _forward[(B * T,)](x, f, mod, r, y, hat, inv, T, D, eps, triton.next_power_of_2(D))
        ctx.save_for_backward(f, mod, hat, inv)
        return r, y

    @staticmethod
    def backward(ctx, grad_r, grad_y):
        f, mod, hat, inv = ctx.saved_tensors
        B, T, D = f.shape
        blocks = triton.cdiv(T, TOKENS)
        dx, df, part = torch.empty_like(f), torch.empty_like(f), f.new_zeros(B, blocks, 3 * D)
        gr, gy = grad_r.contiguous(), grad_y.contiguous()
        _backward[(B, blocks)](
            gr, gy, f, mod, hat, inv, dx, df, part, T, D, blocks, TOKENS, triton.next_power_of_2(D)
        )  # fmt: skip
        return dx, df, part.sum(1), None


def kernel(x, f, mod, eps):
    return AdaLN.apply(x, f, mod, eps)


def parts(B, T, D):
    return {"shift": (0, D), "scale": (D, 2 * D), "gate": (2 * D, 3 * D)}


def target():
    return assay.Target(
        kernel, golden, cases=[images, few, narrow], name="adaln", outputs=("r", "y"), segments={"mod.grad": parts}
    )  # fmt: skip
