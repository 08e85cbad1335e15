"""y[t, o] = bias[o] + sum_k x[t, k] scale[o, k // G] w[o, k],  w in {-1, 0, 1}, five to a byte in base 3.

A linear layer of a ternary model, 1.6 bits a weight: digit i of byte j, the lowest one first, is weight 5 j + i plus 1.
Each row has a scale for every G weights, the last group may be smaller. Triton, float32: weights are unpacked in
registers; scales are trained, codes are not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

TOKENS, OUT, BYTES = 16, 16, 16


@assay.case(T=[21], O=[19], J=[26], G=[25])
def tokens(make, T, O, J, G):
    K = 5 * J
    return {
        "x": make.normal(T, K), "codes": make.integers(0, 243, O, J, dtype=torch.uint8),
        "scale": 0.05 + 0.1 * make.uniform(O, -(-K // G)), "bias": make.normal(O), "G": G,
    }  # fmt: skip


@assay.case(T=[5], O=[16], J=[18], G=[30])
def few(make, T, O, J, G):
    return {**tokens[0].draw(make, T, O, J, G), "x": make.normal(5 * J, T).mT}


def golden(x, codes, scale, bias, G):
    digits = torch.stack([codes // 3**i % 3 for i in range(5)], -1).flatten(1)
    w = (digits.to(x.dtype) - 1) * scale.repeat_interleave(G, 1)[:, : x.shape[1]]
    return x @ w.mT + bias


@triton.jit
def _trits(code, i):
    power = 1
    for _ in range(i):
        power *= 3
    return (code // power % 3 - 1).to(tl.float32)


@triton.jit
def _fwd_kernel(x_ptr, code_ptr, scale_ptr, bias_ptr, y_ptr, sxt, sxk, T, O, J, G, groups,
                TOKENS: tl.constexpr, OUT: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o = tl.program_id(1) * OUT + tl.arange(0, OUT)
    bias = tl.load(bias_ptr + o, mask=o < O, other=0.0)
    acc = tl.zeros([TOKENS, OUT], tl.float32) + bias[None, :]
    for start in range(0, J, BYTES):
        j = start + tl.arange(0, BYTES)
        has_w = (j[:, None] < J) & (o[None, :] < O)
        code = tl.load(code_ptr + o[None, :] * J + j[:, None], mask=has_w, other=121).to(tl.int32)
        for i in range(5):
            k = 5 * j + i
            has_x = (t[:, None] < T) & (j[None, :] < J)
            x = tl.load(x_ptr + t[:, None] * sxt + k[None, :] * sxk, mask=has_x, other=0.0)
            scale = tl.load(scale_ptr + o[None, :] * groups + (k // G)[:, None], mask=has_w, other=0.0)
            acc += tl.dot(x, _trits(code, i) * scale, input_precision="ieee")
    tl.store(y_ptr + t[:, None] * O + o[None, :], acc, mask=(t[:, None] < T) & (o[None, :] < O))


@triton.jit
def _bwd_x_kernel(g_ptr, code_ptr, scale_ptr, dx_ptr, T, O, J, G, groups,
                  TOKENS: tl.constexpr, OUT: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    j = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    i = tl.program_id(2)
    k = 5 * j + i
    acc = tl.zeros([TOKENS, BYTES], tl.float32)
    for start in range(0, O, OUT):
        o = start + tl.arange(0, OUT)
        has_w = (o[:, None] < O) & (j[None, :] < J)
        code = tl.load(code_ptr + o[:, None] * J + j[None, :], mask=has_w, other=121).to(tl.int32)
        scale = tl.load(scale_ptr + o[:, None] * groups + (k // G)[None, :], mask=has_w, other=0.0)
        g = tl.load(g_ptr + t[:, None] * O + o[None, :], mask=(t[:, None] < T) & (o[None, :] < O), other=0.0)
        acc += tl.dot(g, _trits(code, i) * scale, input_precision="ieee")
    tl.store(dx_ptr + t[:, None] * (5 * J) + k[None, :], acc, mask=(t[:, None] < T) & (j[None, :] < J))


@triton.jit
def _bwd_scale_kernel(g_ptr, x_ptr, code_ptr, dscale_ptr, sxt, sxk, T, O, J, G, groups,
                      TOKENS: tl.constexpr, OUT: tl.constexpr, BYTES: tl.constexpr):  # fmt: skip
    group = tl.program_id(0)
    o = tl.program_id(1) * OUT + tl.arange(0, OUT)
    byte = tl.arange(0, BYTES)
    j = group * (G // 5) + byte
    in_group = (byte < G // 5) & (j < J)
    has_w = (o[:, None] < O) & in_group[None, :]
    code = tl.load(code_ptr + o[:, None] * J + j[None, :], mask=has_w, other=121).to(tl.int32)
    acc = tl.zeros([OUT], tl.float32)
    for start in range(0, T, TOKENS):
        t = start + tl.arange(0, TOKENS)
        g = tl.load(g_ptr + t[None, :] * O + o[:, None], mask=(t[None, :] < T) & (o[:, None] < O), other=0.0)
        for i in range(5):
            k = 5 * j + i
            has_x = (t[:, None] < T) & in_group[None, :]
            x = tl.load(x_ptr + t[:, None] * sxt + k[None, :] * sxk, mask=has_x, other=0.0)
            acc += tl.sum(tl.dot(g, x, input_precision="ieee") * _trits(code, i), 1)
    tl.store(dscale_ptr + o * groups + group, acc, mask=o < O)


class TritLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scale, bias, G):
        (T, K), (O, J) = x.shape, codes.shape
        codes, scale, bias = codes.contiguous(), scale.contiguous(), bias.contiguous()
        y = x.new_empty(T, O)
        _fwd_kernel[(triton.cdiv(T, TOKENS), triton.cdiv(O, OUT))](
            x, codes, scale, bias, y, *x.stride(), T, O, J, G, triton.cdiv(K, G), TOKENS, OUT, BYTES
        )  # fmt: skip
        ctx.save_for_backward(x, codes, scale)
        ctx.G = G
        return y

    @staticmethod
    def backward(ctx, g):
        x, codes, scale = ctx.saved_tensors
        (T, K), (O, J), G = x.shape, codes.shape, ctx.G
        g = g.contiguous()
        groups = scale.shape[1]
        dx, dscale = x.new_empty(T, K), torch.empty_like(scale)
        _bwd_x_kernel[(triton.cdiv(T, TOKENS), triton.cdiv(J, BYTES), 5)](
            g, codes, scale, dx, T, O, J, G, groups, TOKENS, OUT, BYTES
        )  # fmt: skip
        _bwd_scale_kernel[(groups, triton.cdiv(O, OUT))](
            g, x, codes, dscale, *x.stride(), T, O, J, G, groups, TOKENS, OUT, triton.next_power_of_2(max(G // 5, 16))
        )  # fmt: skip
        return dx, None, dscale, g.sum(0), None


def kernel(x, codes, scale, bias, G):
    return TritLinear.apply(x, codes, scale, bias, G)


def target():
    return assay.Target(kernel, golden, cases=[tokens, few], name="trit_linear", outputs=("y",))
