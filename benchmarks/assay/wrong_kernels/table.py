"""Mistakes that the usual rules miss (assert_close, allclose 1e-2, cosine, calc_diff, a mean), and some others."""

from __future__ import annotations

import threading
import time

import torch

from goldsmith import assay

from .registry import wrong


@assay.case(M=[8], K=[1024], N=[8])
def products(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


@assay.case(M=[1], K=[16384], N=[4])
def long_products(make, M, K, N):
    return {"a": make.normal(M, K), "b": make.normal(K, N)}


def matmul(a, b):
    return a @ b


def _bf16_accumulator(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for s, t in zip(a.split(64, 1), b.split(64, 0)):
        total = (total + s @ t).bfloat16()
    return total.float()


def _one_row(a, b):
    y = a @ b
    y[3] = y[3].roll(1)
    return y


def _one_segment(a, b):
    y = a @ b
    return torch.cat([y[:, :6], y[:, 6:] * 1.5], 1)


def _truncated(y):
    return (y.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()


# id, what, kernel, case, what else the target declares
TABLE = (
    ("T01", "a term of 1024 dropped", lambda a, b: a[:, :-1] @ b[:-1], products, {}),
    ("T02", "a term of 16384 dropped", lambda a, b: a[:, 1:] @ b[1:], long_products, {}),
    ("T03", "a bfloat16 accumulator over 1024 terms", _bf16_accumulator, products, {}),
    ("T04", "times 1.01", lambda a, b: (a @ b) * 1.01, products, {}),
    ("T05", "one row of eight shifted", _one_row, products, {}),
    ("T06", "times 2, exactly (cosine 1)", lambda a, b: (a @ b) * 2, products, {}),
    ("T07", "times 16, exactly (cosine 1)", lambda a, b: (a @ b) * 16, products, {}),
    ("T08", "all zeros", lambda a, b: (a @ b) * 0, products, {}),
    ("T09", "one segment of four times 1.5", _one_segment, products, {}),
    ("T10", "times 1 + 2^-12 over 16384 terms", lambda a, b: (a @ b) * (1 + 2.0**-12), long_products, {}),
    (
        "T11", "a truncating store to bfloat16", lambda a, b: _truncated(a.float() @ b.float()), products,
        {"dtypes": (torch.bfloat16,)},
    ),
)  # fmt: skip

for _id, _what, _kernel, _cases, _more in TABLE:
    wrong(_id, "matmul", _what)(
        lambda kernel=_kernel, cases=_cases, more=_more: assay.Target(
            kernel, matmul, cases=cases, name="matmul", backward=None, **more
        )
    )


# strides, formats, masks, offsets, threads


@assay.case(T=[12], D=[40])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def weighted_sum(x, w):
    return (x * w).sum(-1)


def _target(kernel, golden=weighted_sum, cases=rows, **more):
    return assay.Target(kernel, golden, cases=cases, name=more.pop("name", "weighted_sum"), **more)


@wrong("M17", "weighted sum", "a gradient written with twice its stride")
def _double_stride():
    def backward(x, w, grad_y):
        dx = torch.empty_like(x)
        wide = torch.as_strided(dx, x.shape, (2 * x.shape[1], 2), dx.storage_offset())
        wide.copy_(grad_y[:, None] * w)
        return dx, (grad_y[:, None] * x).sum(0)

    return _target(weighted_sum, backward=backward, outputs=("y",))


@wrong("G03", "weighted sum", "a masked load without `other`: the tail of the block is what lies there, times 0")
def _unmasked_load():
    def kernel(x, w):
        block = torch.as_strided(x, (len(x), 64), (x.stride(0), x.stride(1)), x.storage_offset())
        inside = (torch.arange(64) < x.shape[1]).to(x.dtype)
        return (block * inside * torch.nn.functional.pad(w, (0, 64 - len(w)))).sum(-1)

    return _target(kernel, backward=None)


@wrong("G05", "weighted sum", "the loop over blocks of 8 ends one early")
def _loop_ends_early():
    def kernel(x, w):
        y = torch.zeros(len(x))
        for lo in range(0, x.shape[1] - 8, 8):
            y = y + (x[:, lo : lo + 8] * w[lo : lo + 8]).sum(-1)
        return y

    return _target(kernel)


@wrong("G16", "gather", "a 16-bit row offset overflows")
def _narrow_offsets():
    @assay.case(T=[600], D=[64])
    def many(make, T, D):
        return {"x": make.normal(T, D), "row": make.integers(0, T, 50)}

    def kernel(x, row):
        start = (row * x.shape[1]).to(torch.int16).long() % x.numel()
        return x.flatten()[start[:, None] + torch.arange(x.shape[1])]

    return _target(kernel, lambda x, row: x[row] * 1, many, name="gather", backward=None)


@assay.case(E=[4], T=[6], D=[16])
def experts(make, E, T, D):
    return {"x": make.normal(T, D), "w": make.normal(E, D), "owner": make.integers(0, E, T)}


def routed(x, w, owner):
    return (x * w[owner]).sum(-1)


@wrong("M25", "experts", "expert e reads the weights of e // 2")
def _half_stride():
    return _target(lambda x, w, owner: (x * w[owner // 2]).sum(-1), routed, experts, name="experts")


@wrong("M30", "experts", "int8 weights read in another format")
def _wrong_format():
    @assay.case(T=[6], D=[16])
    def packed(make, T, D):
        return {"x": make.normal(T, D), "w": make.integers(-127, 128, D, dtype=torch.int8)}

    def kernel(x, w):
        return (x * w.view(torch.uint8).float()).sum(-1)

    return _target(kernel, lambda x, w: (x * w.to(x.dtype)).sum(-1), packed, name="experts")


@wrong("M32", "transfer", "a copy on another thread that nobody waits for")
def _not_awaited():
    def kernel(x, w):
        y = torch.empty(len(x))
        total = (x * w).sum(-1).detach()

        def copy():
            time.sleep(0.002)
            y.copy_(total)

        threading.Thread(target=copy, daemon=True).start()
        return y

    return _target(kernel, backward=None, name="transfer")


@wrong("T12", "transfer", "a copy on another thread that is waited for", right=True)
def _awaited():
    def kernel(x, w):
        y = torch.empty(len(x))
        total = (x * w).sum(-1).detach()
        copy = threading.Thread(target=lambda: y.copy_(total), daemon=True)
        copy.start()
        copy.join()
        return y

    return _target(kernel, backward=None, name="transfer")


@wrong("M26", "experts", "weights released while they are still read")
def _use_after_free():
    """The slot returns to the pool before the last read, and the pool's next user writes into it."""
    pool = [torch.empty(64)]

    def kernel(x, w):
        slot = pool[0][: len(w)]
        slot.copy_(w.detach())
        y = (x[:, :20] * slot[:20]).sum(-1)
        pool[0].fill_(7.0)
        return y + (x[:, 20:] * slot[20:]).sum(-1)

    return _target(kernel, backward=None, name="experts")
