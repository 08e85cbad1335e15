"""A Triton kernel copies the result that plain torch has computed inside a scripted function."""

import torch
import triton
import triton.language as tl

PROBLEM = "a_matmul"
STATUS = "cheating"
REASONS = {"plain_torch"}
KERNEL_ASKED = True


@triton.jit
def _matmul_kernel(a_ptr, y_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(a_ptr + at, mask=at < size), mask=at < size)


@torch.jit.script
def _prepare(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        prepared = _prepare(a, b)
        y = torch.empty_like(prepared)
        _matmul_kernel[(triton.cdiv(y.numel(), 64),)](prepared, y, y.numel(), BLOCK=64)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        a, b = ctx.saved_tensors
        return grad_y @ b.T, a.T @ grad_y


candidate = Matmul.apply
