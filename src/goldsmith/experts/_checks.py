"""Checks of the arguments of the family's operators, with one error message per mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.shapes import ShapeError, check_at_least, check_choice, check_dtype, check_same_device, check_tensor
from ._conventions import ACTIVATIONS, AXES, FACTORS, FLOATS, TARGETS, MoeOptions, named, number
from ._weights import sizes
from .packed.layout import Layout

WHOLE = ("int8", "int4", "int4_asym")  # formats with integer codes
LONGEST = 2**31 // (127 * 128)  # most inputs whose sum of products always fits into int32
_REQUIRED = ("x", "topk_ids", "topk_weights", "gate_up", "down")


def check_moe(op: str, tensors: Mapping[str, Tensor | None], options: MoeOptions) -> None:
    """Check all arguments except the values of topk_ids, which the backend checks."""
    present: dict[str, Any] = {name: t for name, t in tensors.items() if t is not None or name in _REQUIRED}
    for name, tensor in present.items():
        check_tensor(op, name, tensor)
    _check_dtypes(op, present, options)
    _check_pairs(op, present)
    check_base(op, present["gate_up"], present["down"], options["layout"])
    _check_shapes(op, present, options["layout"])
    check_same_device(op, {name: t for name, t in present.items() if name != "seed"})
    _check_options(op, present, options)


def _check_dtypes(op: str, tensors: Mapping[str, Tensor], options: MoeOptions) -> None:
    x = tensors["x"]
    packed = bool(options["layout"])
    for name, tensor in tensors.items():
        if name == "topk_ids":
            check_dtype(op, name, tensor, (torch.int32, torch.int64))
        elif name == "seed":
            check_dtype(op, name, tensor, (torch.int64,))
        elif packed and name in ("gate_up", "down"):
            check_dtype(op, name, tensor, (torch.uint8,))
        else:
            check_dtype(op, name, tensor, FLOATS)
            if tensor.dtype == torch.float64 and x.dtype != torch.float64:
                raise TypeError(
                    f"{op}: {name} is float64, but x is {named(x.dtype)}; convert one: x.double() or {name}.float()"
                )
    weights = tensors.get("topk_weights", x).dtype
    if weights not in (torch.float32, x.dtype):
        raise TypeError(f"{op}: topk_weights is {named(weights)}, expected float32 or x's {named(x.dtype)}")
    if tensors["gate_up"].dtype != tensors["down"].dtype:
        raise TypeError(
            f"{op}: down is {named(tensors['down'].dtype)}, but gate_up is {named(tensors['gate_up'].dtype)}; convert "
            "one: down.to(gate_up.dtype)"
        )


def _check_pairs(op: str, tensors: Mapping[str, Tensor]) -> None:
    for target in TARGETS:
        a, b = f"{target}_a", f"{target}_b"
        if (a in tensors) != (b in tensors):
            other, missing = (a, b) if a in tensors else (b, a)
            raise ValueError(f"{op}: {other} is given without {missing}; LoRA on {target} needs both or neither")


def check_base(op: str, gate_up: Tensor, down: Tensor, layout: str) -> None:
    """Check plain tensors [E, 2I, H] and [E, H, I], or the two blobs that `layout` describes."""
    if layout:
        packed = Layout.parse(layout)
        for name, blob in (("gate_up", gate_up), ("down", down)):
            size = packed.nbytes(name)
            if tuple(blob.shape) != (size,):
                raise ShapeError(
                    f"{op}: {name} is {list(blob.shape)}, but a base of layout {layout!r} has [{size}] bytes"
                )
        return
    wanted = {"gate_up": (gate_up, _pattern("gate_up")), "down": (down, _pattern("down"))}
    for name, (tensor, _) in wanted.items():
        if tensor.dim() != 3 or 0 in tensor.shape:
            _fail(op, f"{name} needs three dimensions of at least 1", wanted)
    experts, hidden, inner = down.shape
    if gate_up.shape[0] != experts:
        _fail(op, f"gate_up has experts={gate_up.shape[0]}, but down has experts={experts}", wanted)
    if gate_up.shape[2] != hidden:
        _fail(op, f"gate_up has hidden={gate_up.shape[2]}, but down has hidden={hidden}", wanted)
    if gate_up.shape[1] != 2 * inner:
        text = f"gate_up has {gate_up.shape[1]} rows, but down has intermediate={inner}: gate_up needs {2 * inner}"
        _fail(op, text, wanted)


def _check_shapes(op: str, tensors: Mapping[str, Tensor], layout: str) -> None:
    experts, hidden, inner = sizes(tensors["gate_up"], tensors["down"], layout)
    x, ids = tensors["x"], tensors["topk_ids"]

    def fail(problem: str) -> None:
        omitted = ("seed", *(("gate_up", "down") if layout else ()))
        _fail(op, problem, {n: (t, _pattern(n)) for n, t in tensors.items() if n not in omitted})

    if x.dim() == 0 or x.shape[-1] != hidden:
        fail(f"x has hidden={x.shape[-1] if x.dim() else None}, but the base has hidden={hidden}")
    if ids.dim() == 0 or ids.shape[:-1] != x.shape[:-1]:
        fail("topk_ids and x need the same leading dimensions")
    if tensors.get("topk_weights", ids).shape != ids.shape:
        fail("topk_weights and topk_ids need the same shape")
    for name, width in (("gate_up_bias", 2 * inner), ("down_bias", hidden)):
        if name in tensors and tensors[name].shape != (experts, width):
            fail(f"{name} is not [{experts}, {width}], one row for each expert of the base")
    for name in FACTORS:
        if name in tensors:
            _check_factor(name, tensors, experts, hidden, inner, fail)


def _check_factor(
    name: str, tensors: Mapping[str, Tensor], experts: int, hidden: int, inner: int, fail: Callable[[str], None]
) -> None:
    target, which = name.split("_")
    tensor = tensors[name]
    out, width = (hidden, inner) if target == "down" else (inner, hidden)
    if tensor.dim() != 3:
        fail(f"{name} has {tensor.dim()} dimensions, expected 3")
    if tensor.shape[0] != experts:
        fail(f"{name} has experts={tensor.shape[0]}, but the base has experts={experts}")
    if which == "a":
        if tensor.shape[2] != width:
            fail(f"{name} takes {tensor.shape[2]} inputs, but {target} of the base takes {width}")
        return
    if tensor.shape[1] != out:
        fail(f"{name} gives {tensor.shape[1]} outputs, but {target} of the base gives {out}")
    if tensor.shape[2] != tensors[f"{target}_a"].shape[1]:
        fail(f"{name} has rank={tensor.shape[2]}, but {target}_a has rank={tensors[f'{target}_a'].shape[1]}")


def _pattern(name: str) -> str:
    return AXES[name].split(" | ")[0]


def _fail(op: str, problem: str, arguments: Mapping[str, tuple[Tensor, str]]) -> None:
    shapes = {name: f"{list(t.shape)}," for name, (t, _) in arguments.items()}
    first, second = max(map(len, shapes)) + 1, max(map(len, shapes.values()))
    lines = [
        f"  {name + ':':{first}} {shapes[name]:{second}} expected [{', '.join(pattern.split())}]"
        for name, (_, pattern) in arguments.items()
    ]
    raise ShapeError("\n".join([f"{op}: {problem}", *lines]))


def _check_options(op: str, tensors: Mapping[str, Tensor], options: MoeOptions) -> None:
    check_activation(op, options["activation"], options["limit"])
    dropout = options.get("dropout", 0.0)
    if not 0 <= dropout < 1:
        raise ValueError(f"{op}: dropout={dropout!r}, expected a probability of at least 0 and below 1")
    tokens = math.prod(tensors["x"].shape[:-1])
    if dropout and ("seed" not in tensors or tensors["seed"].numel() not in (1, 1 + tokens)):
        raise ValueError(
            f"{op}: dropout={dropout!r} needs `seed`, a tensor with one number, or with {1 + tokens}: the seed and the "
            "number of each token"
        )


def check_activation(op: str, activation: object, limit: object) -> None:
    check_choice(op, "activation", activation, ACTIVATIONS)
    if limit is not None:
        check_at_least(op, "limit", number(op, "limit", limit), 0.0)


def check_int8(op: str, layout: str) -> None:
    """Raise ValueError unless this base supports integer products (compute='int8')."""
    packed = Layout.parse(layout) if layout else None
    if packed is None or packed.format not in WHOLE:
        kind = packed.format if packed else "plain tensors"
        raise ValueError(
            f"{op}: compute='int8' needs a base packed as {', '.join(WHOLE[:-1])} or {WHOLE[-1]}, not {kind}; pack it "
            "in one of these formats, or use compute='float'"
        )
    group = packed.group_size or max(packed.hidden_size, packed.intermediate_size)
    if group > LONGEST:
        raise ValueError(
            f"{op}: compute='int8' sums a group in int32, which is safe for {LONGEST} inputs, not {group}; pack the "
            "base with a group_size, or use compute='float'"
        )
