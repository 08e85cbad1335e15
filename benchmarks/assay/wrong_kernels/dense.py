"""Mistakes in matrix products, weighted sums, swiglu and scatters: operands, accumulators, strides, stores."""

from __future__ import annotations

import torch

from goldsmith import assay

from .registry import wrong


@assay.case(M=[24], K=[64], N=[24])
def matrices(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


@assay.case(M=[20], K=[20], N=[20])
def square(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


@assay.case(M=[1], K=[16384], N=[1])
def long_dot(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


def matmul(a, b):
    return a @ b


class Product(torch.autograd.Function):
    """a b with one mistake in forward or backward."""

    @staticmethod
    def forward(ctx, a, b, fault):
        ctx.save_for_backward(a, b)
        ctx.fault = fault
        if fault == "transposed":
            return a @ b.T
        if fault == "last_block":
            return a[:, -32:] @ b[-32:]
        if fault == "one_term":
            return a[:, :-1] @ b[:-1]
        if fault == "bf16":
            acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
            for lo in range(0, a.shape[1], 8):
                acc = (acc + a[:, lo : lo + 8] @ b[lo : lo + 8]).bfloat16()
            return acc.float()
        if fault == "fp16_product":
            return (a.half().unsqueeze(-1) * b.half()).float().sum(1)
        if fault == "half_filled":
            y = torch.zeros(a.shape[0], b.shape[1])
            y.view(torch.bfloat16).flatten()[: y.numel()] = (a @ b).flatten().bfloat16()
            return y
        if fault == "overrun":
            y = torch.empty(a.shape[0], b.shape[1])
            torch.as_strided(y, (y.numel() + 1,), (1,), y.storage_offset())[-1] = 0
            return y.copy_(a @ b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        fault = ctx.fault
        if fault == "dense_gradient":
            g = torch.as_strided(g, g.shape, (g.shape[1], 1), g.storage_offset())
        if fault == "stride_order":
            g = torch.as_strided(g, g.shape, (g.stride(0), 1), g.storage_offset())
        da, db = g @ b.T, a.T @ g
        if fault == "swapped":
            da, db = db, da
        if fault == "aliased":
            da = a.copy_(da)
        if fault == "modifies_gradient":
            g.mul_(2)
        if fault == "sign":
            db = -db
        if fault == "returned_early":
            db = torch.zeros_like(b)
        if fault == "saved_shift":
            db = a.roll(1, 0).T @ g
        if fault == "strides_swapped":
            db = torch.as_strided(db, db.shape, (1, db.shape[0]), db.storage_offset())
        return da, db, None


def product(fault, cases=matrices, **more):
    def kernel(a, b):
        return Product.apply(a, b, fault)

    return assay.Target(kernel, matmul, cases=cases, name=f"matmul_{fault or 'right'}", **more)


wrong("D00", "matmul", "a product as it should be", right=True)(lambda: product(""))
for _id, _fault, _what, _cases in (
    ("G06", "transposed", "an operand transposed (square)", square),
    ("M09", "last_block", "acc = instead of acc +=", matrices),
    ("D01", "one_term", "one term of 16384 dropped", long_dot),
    ("G13", "bf16", "a bfloat16 accumulator", matrices),
    ("M31", "fp16_product", "products in fp16, which overflow", matrices),
    ("M11", "half_filled", "a bfloat16 store into a float32 buffer", matrices),
    ("M24", "overrun", "one element written past the end", matrices),
    ("G18", "dense_gradient", "a stride-0 gradient read as dense", matrices),
    ("G17", "stride_order", "the last stride of the gradient ignored", matrices),
    ("G30", "swapped", "two gradients exchanged", square),
    ("M19", "aliased", "a gradient stored over a saved input", square),
    ("D02", "modifies_gradient", "the output gradient modified", matrices),
    ("G08", "sign", "the sign of a gradient flipped", matrices),
    ("M20", "returned_early", "a gradient left at zero", matrices),
    ("M21", "saved_shift", "saved rows in another order", matrices),
    ("G07", "strides_swapped", "strides of a gradient swapped", square),
):
    wrong(_id, "matmul", _what)(lambda fault=_fault, cases=_cases: product(fault, cases))


# swiglu


@assay.case(T=[11], D=[33])
def gates(make, T, D):
    return {"a": make.normal(T, D), "b": make.normal(T, D)}


def swiglu(a, b):
    return torch.nn.functional.silu(a) * b


class SwiGLU(torch.autograd.Function):
    """silu(a) b; the backward may overwrite the saved inputs, or use wrong saved tensors."""

    @staticmethod
    def forward(ctx, a, b, fault):
        ctx.fault = fault
        y = torch.nn.functional.silu(a) * b
        ctx.save_for_backward(torch.nn.functional.silu(a) if fault == "pre_activation" else a, b)
        return y

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        da, db = g * b * s * (1 + a * (1 - s)), g * a * s
        if ctx.fault == "over_saved":
            return a.copy_(da), b.copy_(db), None
        if ctx.fault == "one_doubled":
            return da + db, torch.zeros_like(db), None
        return da, db, None


for _id, _fault, _what in (
    ("D03", "over_saved", "gradients stored over the saved inputs (as Liger's swiglu does)"),
    ("M22", "pre_activation", "the activation saved instead of its input"),
    ("G29", "one_doubled", "a gradient given to the wrong input"),
):
    wrong(_id, "swiglu", _what)(
        lambda fault=_fault: assay.Target(lambda a, b: SwiGLU.apply(a, b, fault), swiglu, cases=gates, name="swiglu")
    )


@wrong("D04", "swiglu", "the same memory trade, declared with mutates=", right=True)
def _declared():
    def kernel(a, b):
        return SwiGLU.apply(a, b, "over_saved")

    return assay.Target(kernel, swiglu, cases=gates, name="swiglu", mutates=("a", "b"))


# scatters


@assay.case(T=[40], E=[9], D=[8])
def tokens(make, T, E, D):
    return {"x": make.normal(T, D), "owner": make.integers(0, E, T), "experts": E}


@assay.case(T=[40], E=[9], D=[8])
def some_invalid(make, T, E, D):
    return {"x": make.normal(T, D), "owner": make.integers(-1, E, T), "experts": E}


def gather_sum(x, owner, experts):
    return x.new_zeros(experts, x.shape[1]).index_add(0, owner, x)


def gather_valid(x, owner, experts):
    valid = owner >= 0
    return x.new_zeros(experts, x.shape[1]).index_add(0, owner[valid], x[valid])


@wrong("G27", "scatter", "duplicate indices overwrite one another")
def _lost_update():
    def kernel(x, owner, experts):
        return x.new_zeros(experts, x.shape[1]).index_copy(0, owner, x)

    return assay.Target(kernel, gather_sum, cases=tokens, name="scatter", backward=None)


@wrong("M02", "scatter", "index -1 is not masked")
def _minus_one():
    def kernel(x, owner, experts):
        return x.new_zeros(experts, x.shape[1]).index_add(0, owner % experts, x)

    return assay.Target(kernel, gather_valid, cases=some_invalid, name="scatter")


@wrong("D05", "scatter", "scatter as it should be", right=True)
def _right_scatter():
    return assay.Target(gather_sum, gather_sum, cases=tokens, name="scatter")


@wrong("G02", "scatter", "the mask is <= and reads one row past the end")
def _off_by_one():
    def kernel(x, owner, experts):
        y = x.new_zeros(experts, x.shape[1])
        wide = torch.as_strided(x, (len(x) + 1, x.shape[1]), x.stride(), x.storage_offset())
        return y.index_add(0, torch.cat([owner, owner[:1]]), wide)

    return assay.Target(kernel, gather_sum, cases=tokens, name="scatter", backward=None)
