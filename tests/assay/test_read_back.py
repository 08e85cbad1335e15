"""A backward may read rounded 16-bit outputs again, as FlashAttention's does."""

import functools

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.bounds.running_errors import running_bounds

pytestmark = pytest.mark.sweep(2)

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def attention(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def flash(q, k, v, fault=None):
    """delta = rowsum(dy y), with the returned y."""

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
            lse = torch.logsumexp(s, -1, keepdim=True)
            y = (torch.exp(s - lse) @ v.float()).to(q.dtype)
            ctx.save_for_backward(q, k, v, y, lse)
            return y

        @staticmethod
        def backward(ctx, dy):
            q, k, v, y, lse = (t.float() for t in ctx.saved_tensors)
            dy, c = dy.float(), q.shape[-1] ** -0.5
            p = torch.exp(q @ k.mT * c - lse)
            each = dy * y
            delta = (each[..., 1:] if fault == "one column short" else each).sum(-1, keepdim=True)
            if fault == "of the next row":
                delta = delta.roll(-1, -2)
            ds = p * (dy @ v.mT - delta)
            return tuple(t.to(ctx.saved_tensors[0].dtype) for t in (ds @ k * c, ds.mT @ q * c, p.mT @ dy))

    return Flash.apply(q, k, v)


@assay.case(B=[2], T=[9], D=[16])
def heads(make, B, T, D):
    return {name: make.normal(B, T, D) for name in "qkv"}


def add_norm(x, residual, w):
    h = x + residual
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w, h


def fused_add_norm(x, residual, w, fault=None):
    """The backward reads h as returned (rounded), and 1 / rms as computed."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, residual, w):
            h = x.float() + residual.float()
            r = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(h.to(x.dtype), w, r, x)
            return (h * r * w.float()).to(x.dtype), h.to(x.dtype)

        @staticmethod
        def backward(ctx, dy, dh):
            h, w, r, x = (t.float() for t in ctx.saved_tensors)
            normed, g = (x if fault == "without the residual" else h) * r, dy.float() * w
            dx = r * (g - normed * (g * normed).mean(-1, keepdim=True)) + dh.float()
            return tuple(t.to(dy.dtype) for t in (dx, dx, (dy.float() * normed).sum(0)))

    return Fused.apply(x, residual, w)


@assay.case(N=[4], C=[24])
def tokens(make, N, C):
    return {"x": make.normal(N, C), "residual": make.normal(N, C), "w": make.normal(C)}


def verdicts(kernel, golden, cases, dtype, **how):
    target = assay.Target(functools.partial(kernel, **how), golden, cases=cases, dtypes=(dtype,))
    return [assay.check(target, raises=False, seed=seed).verdict for seed in range(3)]


@NARROW
@pytest.mark.parametrize("kernel, golden, cases", [(flash, attention, heads), (fused_add_norm, add_norm, tokens)])
def test_a_backward_may_read_rounded_outputs(kernel, golden, cases, dtype):
    assert verdicts(kernel, golden, cases, dtype) == ["pass"] * 3


@NARROW
@pytest.mark.parametrize(
    "kernel, golden, cases, fault",
    [
        (flash, attention, heads, "one column short"),
        (flash, attention, heads, "of the next row"),
        (fused_add_norm, add_norm, tokens, "without the residual"),
    ],
)
def test_a_backward_that_reads_another_tensor_is_found(kernel, golden, cases, fault, dtype):
    assert verdicts(kernel, golden, cases, dtype, fault=fault) == ["fail"] * 3


def test_weights_in_16_bits_are_diagnosed_as_such():
    """torch's attention on a CPU rounds the weights; a missing epsilon is not the cause."""

    def rounding(q, k, v):
        p = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1).to(q.dtype)
        return (p.float() @ v.float()).to(q.dtype)

    def golden(q, k, v):
        return assay.stage("p", torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)) @ v

    diagnosis = assay.diagnose(assay.Target(rounding, golden, cases=heads, dtypes=(torch.bfloat16,), backward=None))
    assert diagnosis.first_wrong_stage == "y" and diagnosis.causes[0].id == "low_precision_accumulation"
    assert "rounds stage p to bfloat16" in diagnosis.causes[0].evidence[0]


def test_float32_outputs_add_no_rounding():
    """With float32 outputs nothing is rounded, so that reading y in bfloat16 is a fault."""

    def rounded(q, k, v):
        return flash(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()

    assert verdicts(rounded, attention, heads, torch.float32) == ["fail"] * 3


def test_the_bound_holds_for_the_worst_rounding_of_an_output():
    """Every y is off by u |y| in the worst direction for the gradient, beyond the bound without read_back."""
    make = torch.Generator().manual_seed(0)
    s, v, dy = (torch.randn(3, *shape, generator=make).double() for shape in ((5, 7), (7, 4), (5, 4)))
    u = 2.0**-8

    def fn(leaves):
        p = torch.softmax(leaves["s"], -1)
        return {"ds": torch.ops.aten._softmax_backward_data(leaves["dy"] @ leaves["v"].mT, p, -1, torch.float64)}

    p, g = torch.softmax(s, -1), dy @ v.mT
    worst = p * (u * (dy * (p @ v)).abs().sum(-1, keepdim=True))
    leaves = {"s": s, "v": v, "dy": dy}
    items = [running_bounds(fn, leaves, compute=torch.float32, stores={"ds": torch.float32}, read_back=read)["ds"]
             for read in (torch.bfloat16, None)]  # fmt: skip
    assert bool(((items[0].value - p * (g - (p * g).sum(-1, keepdim=True))).abs() <= items[1].bound).all())
    assert bool((worst <= items[0].bound).all()) and not bool((worst <= items[1].bound).any())
    assert bool((items[0].bound <= 20 * worst + items[1].bound).all())


def test_gradients_that_read_an_overflowed_output_are_not_judged():
    """Values times 2^12 overflow float16: y is Inf, as it should be."""

    @assay.case(B=[2], T=[9], D=[16])
    def large(make, B, T, D):
        return {"q": make.normal(B, T, D), "k": make.normal(B, T, D), "v": 12 + make.normal(B, T, D)}

    assert verdicts(flash, attention, large, torch.float16) == ["pass"] * 3
