"""mhc.inject on a GPU: one program per token and block of dim, bandwidth-bound.

Elements moved per token at N = 4: the forward reads x and f and writes x_next (9D); the backward reads G and f and
writes df and, if needed, dx: 6D or 10D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from ...core.tracing import stage
from .._kernels.float32_products import int64_stride
from .._kernels.launch import dense, rows, shaped, streams, unsupported_dtype
from .._kernels.mix import partial_dot

LAUNCHES_ONLY = True


def unsupported(tensors: dict, options: dict) -> str | None:
    return unsupported_dtype(tensors["x"], tensors["f"])


@triton.jit(do_not_specialize=["T"])
def _inject_fwd_kernel(
    x_ptr, f_ptr, h_post_ptr, y_ptr, stride_xt, stride_xn, stride_ft, T, D, N: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    stride_xn = int64_stride(stride_xn)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    f = tl.load(f_ptr + t * stride_ft + d, mask=d < D, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + t * stride_xt + i * stride_xn + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + t * (N * D) + i * D + d, x + tl.load(h_post_ptr + t * N + i) * f, mask=d < D)


def forward(x: Tensor, f: Tensor, h_post: Tensor) -> tuple[Tensor]:
    flat, layer = streams(x), rows(f)
    T, n, D = flat.shape
    y = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    block = min(4096 if n <= 4 and x.element_size() == 2 else 1024, power_of_2(D, 16))
    run(
        _inject_fwd_kernel, (T, cdiv(D, block)),
        flat, layer, dense(h_post, -1, n), y, flat.stride(0), flat.stride(1), layer.stride(0), T, D, n, block,
        num_warps=8, rows=D | flat.stride(0) | flat.stride(1) | layer.stride(0),
    )  # fmt: skip
    return (stage("x_next", shaped(y, x.shape)),)


@triton.jit(do_not_specialize=["T"])
def _inject_bwd_kernel(
    f_ptr, h_post_ptr, grad_ptr, dx_ptr, df_ptr, dh_post_ptr, stride_ft, stride_gt, stride_gn, T, D,
    N: tl.constexpr, NEEDS_DX: tl.constexpr, VECTOR: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    stride_gn = int64_stride(stride_gn)
    dots = ()
    for _ in tl.static_range(N):
        dots = dots + (tl.zeros((BLOCK_D // VECTOR,), tl.float32),)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        f = tl.load(f_ptr + t * stride_ft + d, mask=d < D, other=0.0).to(tl.float32)
        df = tl.zeros((BLOCK_D,), tl.float32)
        new = ()
        for i in tl.static_range(N):
            g = tl.load(grad_ptr + t * stride_gt + i * stride_gn + d, mask=d < D, other=0.0)
            df += tl.load(h_post_ptr + t * N + i) * g.to(tl.float32)
            new = new + (dots[i] + partial_dot(f, g.to(tl.float32), BLOCK_D, VECTOR),)
            if NEEDS_DX:
                tl.store(dx_ptr + t * (N * D) + i * D + d, g, mask=d < D)
        dots = new
        tl.store(df_ptr + t * D + d, df, mask=d < D)
    for i in tl.static_range(N):
        tl.store(dh_post_ptr + t * N + i, tl.sum(dots[i], axis=0))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, f, h_post = (tensors[name] for name in ("x", "f", "h_post"))
    n, D = x.shape[-2:]
    layer, grad = rows(f), streams(grads["x_next"])
    T, needs_dx = grad.shape[0], "x" in needs
    new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    out = {"f": new((T, D), f.dtype), "h_post": new((T, n), torch.float32)}
    if needs_dx:
        out["x"] = new((T, n, D), x.dtype)
    vector = 8 if x.element_size() == 2 else 4
    block = min(1024 if n <= 4 else 256, power_of_2(D, 16))
    run(
        _inject_bwd_kernel, (T,),
        layer, dense(h_post, -1, n), grad, out.get("x", out["f"]), out["f"], out["h_post"],
        layer.stride(0), grad.stride(0), grad.stride(1), T, D, n, needs_dx, vector, block, num_warps=4,
        rows=D | layer.stride(0) | grad.stride(0) | grad.stride(1),
    )  # fmt: skip
    names = {"f": "df", "h_post": "dh_post", "x": "dx_post"}
    return {name: stage(names[name], shaped(grad, tensors[name].shape)) for name, grad in out.items()}
