"""mhc.sinkhorn on a GPU: all steps in registers, forward with one matrix per thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import ONE_SUM_FOR_ALL_LANES, cdiv, power_of_2, run
from ...core.tracing import stage
from .._kernels.coefficients import BLOCK_T, TOKENS
from .._kernels.launch import unsupported_n
from .._kernels.sinkhorn import columns, grid, joined, padded, sinkhorn, sinkhorn_backward


def unsupported(tensors: dict, options: dict) -> str | None:
    if options["form"] != "deepseek":
        return f"form={options['form']!r} runs on the reference only; this backend takes form='deepseek'"
    return unsupported_n(tensors["logits"].shape[-1])


@triton.jit(do_not_specialize=["T", "iterations"])
def _sinkhorn_fwd_kernel(logits_ptr, h_res_ptr, T, iterations, eps, N: tl.constexpr, BLOCK_T: tl.constexpr):
    COUNT: tl.constexpr = padded(N * N)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    c = tl.arange(0, COUNT)[None, :]
    live = (t < T) & (c < N * N)
    logits = tl.load(logits_ptr + t * (N * N) + c, mask=live, other=0.0).to(tl.float32)
    result = sinkhorn(columns(logits, COUNT), iterations, eps, N)
    tl.store(h_res_ptr + t * (N * N) + c, joined(result, COUNT), mask=live)


@triton.jit(do_not_specialize=["T", "iterations"])
def _sinkhorn_bwd_kernel(grad_ptr, logits_ptr, d_logits_ptr, scratch_ptr, T, iterations, eps, N: tl.constexpr,
                         NP: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
    j, k, inside = grid(N, NP)
    at, live = t * (N * N) + j * N + k, (t < T) & inside
    logits = tl.load(logits_ptr + at, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
    step = T.to(tl.int64) * N
    d_logits = sinkhorn_backward(grad, logits, inside, j, k, scratch_ptr, step, t, t < T, iterations, eps, N)
    tl.store(d_logits_ptr + at, d_logits, mask=live)


def forward(logits: Tensor, *, iterations: int, eps: float, form: str) -> tuple[Tensor]:
    logits = logits.contiguous()
    n, T = logits.shape[-1], logits[..., 0, 0].numel()
    h_res = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    run(
        _sinkhorn_fwd_kernel, (cdiv(T, TOKENS),),
        logits, h_res, T, iterations, eps, n, TOKENS, num_warps=1, **ONE_SUM_FOR_ALL_LANES,
    )  # fmt: skip
    return (stage("h_res", h_res),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    logits, grad = tensors["logits"].contiguous(), grads["h_res"].contiguous()
    n, T = logits.shape[-1], logits[..., 0, 0].numel()
    iterations = options["iterations"]
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    scratch = torch.empty((2 * iterations, T, n), dtype=torch.float32, device=logits.device)
    run(
        _sinkhorn_bwd_kernel, (cdiv(T, BLOCK_T),),
        grad, logits, d_logits, scratch, T, iterations, options["eps"], n, power_of_2(n), BLOCK_T, num_warps=2,
        **ONE_SUM_FOR_ALL_LANES,
    )  # fmt: skip
    return {"logits": d_logits}
