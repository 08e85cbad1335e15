"""Checks a kernel of your own with the assay: a Triton RMSNorm, right and wrong.

    python examples/verify_your_own.py
    goldsmith verify examples.verify_your_own:target        # from the project's folder; exit status 0
    goldsmith verify examples.verify_your_own:wrong         # exit status 1; the report has the mistake and its place

Without a GPU the kernels run through Triton's interpreter, and without Triton the same steps run in plain torch.
"""

import importlib.util
import os
import sys
import warnings

import torch
from torch import Tensor

from goldsmith import assay

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so it is set before

HAS_TRITON = importlib.util.find_spec("triton") is not None

# ---- the golden: a few lines of plain torch, called with float64 copies of the inputs


def golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    x_hat = assay.stage("x_hat", x * inv_rms)
    return x_hat * w


# ---- the cases: one per combination of sizes


@assay.case(T=[0, 1, 13, 128], D=[32, 100], why="no token, one, a tail of rows, many; a power of two and not")
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


# ---- the kernel

if HAS_TRITON:
    import triton
    import triton.language as tl

    # T tokens, D dim
    @triton.jit
    def _forward_kernel(
        x_ptr, w_ptr, y_ptr, inv_rms_ptr, T, D, divisor, eps, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
    ):
        rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        columns = tl.arange(0, BLOCK_D)
        offsets_TD = rows[:, None] * D + columns[None, :]
        inside_TD = (rows[:, None] < T) & (columns[None, :] < D)
        x_TD = tl.load(x_ptr + offsets_TD, mask=inside_TD, other=0.0).to(tl.float32)
        w_D = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        inv_rms_T = 1.0 / tl.sqrt(tl.sum(x_TD * x_TD, axis=1) / divisor + eps)
        tl.store(inv_rms_ptr + rows, inv_rms_T, mask=rows < T)
        tl.store(y_ptr + offsets_TD, x_TD * inv_rms_T[:, None] * w_D[None, :], mask=inside_TD)

    def forward(x: Tensor, w: Tensor, eps: float, divisor: int) -> tuple[Tensor, Tensor]:
        T, D = x.shape
        y, inv_rms = torch.empty_like(x), torch.empty(T, 1, dtype=torch.float32, device=x.device)
        block_d = triton.next_power_of_2(D)
        _forward_kernel[(triton.cdiv(T, 16),)](x, w, y, inv_rms, T, D, divisor, eps, BLOCK_T=16, BLOCK_D=block_d)
        return y, inv_rms

else:

    def forward(x: Tensor, w: Tensor, eps: float, divisor: int) -> tuple[Tensor, Tensor]:
        inv_rms = torch.rsqrt(x.float().square().sum(-1, keepdim=True) / divisor + eps)
        return (x.float() * inv_rms * w.float()).to(x.dtype), inv_rms


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, eps: float, divisor: int) -> Tensor:
        x, w = x.contiguous(), w.contiguous()  # the kernel takes dense rows
        y, inv_rms = forward(x, w, eps, divisor)
        ctx.save_for_backward(x, w, inv_rms)
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        x, w, inv_rms = ctx.saved_tensors
        x_hat = x.float() * inv_rms
        grad_x_hat = grad_y.float() * w.float()
        grad_x = inv_rms * (grad_x_hat - x_hat * (grad_x_hat * x_hat).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), (grad_y.float() * x_hat).sum(0).to(w.dtype), None, None


def rmsnorm(x, w, eps):
    return RMSNorm.apply(x, w, eps, x.shape[-1])


def rmsnorm_padded(x, w, eps):
    """The mistake: the mean is taken over the block, which is wider than the row unless D is a power of two."""
    return RMSNorm.apply(x, w, eps, 1 << (x.shape[-1] - 1).bit_length())


target = assay.Target(rmsnorm, golden, cases=tokens)  # gradients through autograd
wrong = assay.Target(rmsnorm_padded, golden, cases=tokens)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module="triton"
    )  # the assay feeds NaN and Inf on purpose
    print(assay.check(target, device=device))  # all that a test needs: it raises with the report where the kernel fails
    report = assay.check(wrong, device=device, raises=False)
    print(report)
    sys.exit(report.ok)
