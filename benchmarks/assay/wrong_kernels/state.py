"""Mistakes that a first call on fresh buffers hides: state between calls, races, layouts."""

from __future__ import annotations

import torch

from goldsmith import assay

from .registry import wrong


@assay.case(T=[12], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def scaled_sum(x, w):
    return assay.stage("scaled", x * w).sum(-1)


def target(kernel, *, cases=rows, golden=scaled_sum, **more):
    return assay.Target(kernel, golden, cases=cases, name="weighted_sum", **more)


@wrong("S00", "weighted sum", "a weighted sum as it should be", right=True)
def _right():
    return target(scaled_sum)


@wrong("M03", "weighted sum", "an accumulator from torch.empty")
def _from_empty():
    def kernel(x, w):
        return torch.empty(len(x)) + (x * w).sum(-1)

    return target(kernel)


@wrong("S01", "weighted sum", "a workspace that is not reset between calls")
def _accumulates():
    workspace: dict[tuple, torch.Tensor] = {}

    def kernel(x, w):
        kept = workspace.setdefault(tuple(x.shape), torch.zeros(len(x)))
        y = kept + (x * w).sum(-1)
        kept.copy_(y.detach())
        return y

    return target(kernel)


@wrong("S02", "weighted sum", "a result buffer that every call returns")
def _static_buffer():
    buffers: dict[tuple, torch.Tensor] = {}

    def kernel(x, w):
        out = buffers.setdefault(tuple(x.shape), torch.zeros(len(x)))
        return out.copy_((x * w).sum(-1))

    return target(kernel, backward=None)


@wrong("S03", "weighted sum", "a result cached by shape")
def _cached_result():
    cache: dict[tuple, torch.Tensor] = {}

    def kernel(x, w):
        return cache.setdefault(tuple(x.shape), (x * w).sum(-1).detach()).clone()

    return target(kernel, backward=None)


@wrong("M28", "weighted sum", "weights copied at the first call and never again")
def _stale_copy():
    cache: dict[int, torch.Tensor] = {}

    def kernel(x, w):
        kept = cache.setdefault(len(w), w.detach().clone())
        return (x * (kept + (w - w.detach()))).sum(-1)

    return target(kernel)


@wrong("G19", "weighted sum", "a configuration cached from the first shape")
def _stale_config():
    config: dict[str, int] = {}

    def kernel(x, w):
        block = config.setdefault("block", x.shape[1])
        return (x[:, :block] * w[:block]).sum(-1)

    @assay.case(T=[6], D=[24, 40])
    def two_sizes(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    return target(kernel, cases=two_sizes)


@wrong("M13", "weighted sum", "a stack of saved tensors that is never popped")
def _never_popped():
    stack: list[torch.Tensor] = []

    def forward(x, w):
        stack.append(x.clone())
        if len(stack) > 2:
            raise IndexError("saved stack is full")
        return (x * w).sum(-1)

    def backward(x, w, grad_y):
        return grad_y[:, None] * w, (grad_y[:, None] * x).sum(0)

    return target(forward, backward=backward)


@wrong("M23", "weighted sum", "scratch shared by threads (right with one)")
def _threads():
    def kernel(x, w):
        terms = x * w
        if torch.get_num_threads() > 1:
            terms = torch.cat([terms[:, :-1], terms[:, -1:] * 0], 1)
        return terms.sum(-1)

    return target(kernel)


@wrong("G15", "weighted sum", "an atomic replaced by a store: lost sums, now and then")
def _lost_sums():
    calls = [0]

    def kernel(x, w):
        calls[0] += 1
        terms = x * w
        if calls[0] % 5 == 0:
            terms = torch.cat([terms[:, :-1], terms[:, -1:] * 0], 1)
        return terms.sum(-1)

    return target(kernel)


@wrong("S04", "weighted sum", "atomics in any order: other bits each time, all legal", right=True)
def _any_order():
    generator = torch.Generator().manual_seed(3)

    def kernel(x, w):
        order = torch.randperm(x.shape[1], generator=generator)
        y = torch.zeros(len(x))
        for i in order.tolist():
            y = y + x[:, i] * w[i]
        return y

    return target(kernel)


@wrong("S05", "weighted sum", "an input is overwritten")
def _overwrites():
    def kernel(x, w):
        y = (x * w).sum(-1)
        x.zero_()
        return y

    return target(kernel, backward=None)


@wrong("S06", "weighted sum", "the result is a view of an input")
def _view():
    def kernel(x, w):
        return x.mul_(1)[:, 0]

    return target(kernel, golden=lambda x, w: x[:, 0] * 1, backward=None)


@wrong("S07", "weighted sum", "the grid covers half of the rows")
def _half_grid():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return (x * w).sum(-1)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            dx = torch.empty_like(x)
            dx[: len(x) // 2] = g[: len(x) // 2, None] * w
            return dx, (g[:, None] * x).sum(0)

    return target(Half.apply)


@wrong("G20", "dropout", "the backward drops other elements than the forward")
def _dropout():
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            mask = assay.stage("mask", (torch.rand_like(x) >= p).to(x.dtype))
            ctx.p = p
            return x * mask / (1 - p)

        @staticmethod
        def backward(ctx, g):
            return g * (torch.rand_like(g) >= ctx.p) / (1 - ctx.p), None

    return _dropped(Drop.apply)


@wrong("S08", "dropout", "dropout as it should be", right=True)
def _right_dropout():
    def kernel(x, p):
        mask = assay.stage("mask", (torch.rand_like(x) >= p).to(x.dtype))
        return x * mask / (1 - p)

    return _dropped(kernel)


@wrong("S09", "dropout", "a rate of 0.3 where 0.25 was asked for")
def _wrong_rate():
    def kernel(x, p):
        mask = assay.stage("mask", (torch.rand_like(x) >= 0.3).to(x.dtype))
        return x * mask / (1 - p)

    return _dropped(kernel)


def _dropped(kernel):
    @assay.case(T=[64], D=[128])
    def rates(make, T, D):
        return {"x": make.normal(T, D), "p": 0.25}

    def golden(x, p):
        mask = assay.stage("mask", torch.ones_like(x))
        return x * mask / (1 - p)

    return assay.Target(kernel, golden, cases=rates, name="dropout", decisions={"mask": assay.given(rate="p")})


@wrong("M12", "sharded", "each rank adds the full product")
def _full_weights():
    def kernel(x, w):
        return sum((x * w).sum(-1) for _ in range(2))

    return target(kernel)


@wrong("M27", "sharded", "the second rank's gradient lacks its offset")
def _no_rank_offset():
    def forward(x, w):
        return (x * w).sum(-1)

    def backward(x, w, grad_y):
        dw = torch.zeros_like(w)
        half = len(w) // 2
        dw[:half] = (grad_y[:, None] * x[:, :half]).sum(0)
        dw[:half] += (grad_y[:, None] * x[:, half:]).sum(0)
        return grad_y[:, None] * w, dw

    return target(forward, backward=backward)


@wrong("G26", "weighted sum", "zero tokens raise")
def _empty():
    def kernel(x, w):
        return torch.stack([(row * w).sum() for row in x])

    @assay.case(T=[0, 3], D=[8])
    def maybe_none(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    return target(kernel, cases=maybe_none)


@wrong("M29", "weighted sum", "a group size of zero divides by zero")
def _bad_config():
    def kernel(x, w):
        group = x.shape[1] // 64
        return (x * w).unflatten(1, (x.shape[1] // group, group)).sum((1, 2))

    return target(kernel)


@wrong("S10", "weighted sum", "other layouts of the input read as dense")
def _dense_input():
    def kernel(x, w):
        dense = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
        return (dense * w).sum(-1)

    return target(kernel)


@wrong("S11", "weighted sum", "contiguous only, and it says so", right=True)
def _refuses():
    def kernel(x, w):
        for name, t in (("x", x), ("w", w)):
            if not t.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tuple(t.stride())}")
        return (x * w).sum(-1)

    return target(kernel, layouts="contiguous")


@wrong("S12", "weighted sum", "the second half of a gradient is counted twice")
def _halves_twice():
    def forward(x, w):
        return (x * w).sum(-1)

    def backward(x, w, grad_y):
        dw = (grad_y[:, None] * x).sum(0)
        return grad_y[:, None] * w, torch.cat([dw[:20], dw[20:] * 2])

    return target(forward, backward=backward)
