"""LayerNorm of one row a program, in Triton. The padding of a row takes part in its variance.

After https://github.com/lucidrains/triton-transformer/issues/6 (Tengxu-Sun, 2021).
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay


# T tokens, D dim
@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, D, eps, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, d < D, 0.0)
    mean = tl.sum(x) / D
    centred = x - mean
    inv_std = 1 / tl.sqrt(tl.sum(centred * centred) / D + eps)
    w = tl.load(w_ptr + d, d < D, 0.0)
    b = tl.load(b_ptr + d, d < D, 0.0)
    tl.store(y_ptr + row * D + d, centred * inv_std * w + b, d < D)


def layer_norm(x, w, b, eps):
    T, D = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _layer_norm[(T,)](x.contiguous(), w.contiguous(), b.contiguous(), y, D, eps, BLOCK=triton.next_power_of_2(D))
    return y


def golden(x, w, b, eps):
    centred = x - x.mean(-1, keepdim=True)
    inv_std = assay.stage("inv_std", torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps))
    return centred * inv_std * w + b


@assay.case(T=[3], D=[8, 5])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "b": make.normal(D), "eps": 1e-5}


target = assay.Target(layer_norm, golden, cases=tokens, backward=None, name="layer_norm_tail")
