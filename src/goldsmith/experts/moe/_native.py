"""The CPU backend of experts.moe: calls the native library (csrc/experts).

Forward: 6 H I FLOP per route, and one read of the 3 H I weights of each active expert. Backward: the same cost again,
for dx. One worker computes each float32 sum in a fixed order, so the bits do not depend on the number of threads.
The library reads and writes tensors in place through their strides, and never copies the base.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from .. import _page_pool
from .._conventions import NAMES, TARGETS, MoeOptions, flat
from .._native_abi import NativeCall

# C fields of the gradients; for an input that is not listed the field is "d" + its name
FIELDS = {"topk_weights": "dweights"} | {f"{t}_{ab}": f"{t}.d{ab}" for t in TARGETS for ab in "ab"}


def unsupported(tensors: dict, options: dict) -> str | None:
    return float16(tensors)


def float16(tensors: dict) -> str | None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype == torch.float16:
            return f"{name} is float16, which only the reference and GPUs support; float32 and bfloat16 run here"
    return None


def forward(*tensors: Tensor | None, **options: Unpack[MoeOptions]) -> tuple[Tensor, Tensor, Tensor]:
    named: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
    x = named["x"]
    call = NativeCall(named, options)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    call.keep("y", flat(y))
    shape = (call.tokens * call.slots, call.intermediate) if options["save"] else (0,)
    g, u = _page_pool.empty(shape, x.dtype), _page_pool.empty(shape, x.dtype)
    if options["save"]:
        call.keep("g", g)
        call.keep("u", u)
    call.run("forward", "experts.moe", named["topk_ids"])
    return y, g, u


def backward(grads: dict, tensors: dict, options: MoeOptions, needs: frozenset) -> dict[str, Tensor]:
    if not options["save"]:
        saved = forward(*(tensors[name] for name in NAMES), **options | {"save": True})
        tensors = tensors | dict(zip("gu", saved[1:], strict=True))
    results: dict[str, Tensor] = {}
    call = NativeCall(tensors, options)
    call.keep("dy", flat(grads["y"]).contiguous())
    for name in "gu":
        call.keep(name, tensors[name])
    for name in needs:
        results[name] = torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
        call.keep(FIELDS.get(name, f"d{name}"), flat(results[name]) if name in ("x", "topk_weights") else results[name])
    call.run("backward", "experts.moe", tensors["topk_ids"])
    return results
