"""experts.pack: packs the float weights of a layer's experts, quantised or unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_choice, check_dtype, check_tensor
from .assembly import Progress, assemble, check_nodes, cut
from .experts import PackedExperts
from .formats import FORMATS, Codes, side_by_side
from .inputs import Stack, check_finite, check_flag, check_partitions, zip_experts
from .layout import Expert, Layout
from .memory import frozen
from .quantisation import check_group, check_scale_dtype, quantise

Experts: TypeAlias = Tensor | Iterable[Tensor]  # stacked [E, ...], or one by one

_OP = "experts.pack"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HINT = "; convert float64 with .float(), import quantised weights with from_k2, from_awq, from_fp8_block or from_mxfp4"


def pack(
    gate_up: Experts | tuple[Experts, Experts],
    down: Experts,
    *,
    format: str = "bf16",
    group_size: int | None = None,
    scale_dtype: torch.dtype | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    partitions: int = 1,
    progress: Progress | None = None,
) -> PackedExperts:
    """Pack the weights of a layer's experts, w = value(code) * scale, into one copy for forward and backward

    gate_up [E, 2I, H] (rows 0..I-1 gate, then up), or a pair (gate, up) of [E, I, H]; down [E, H, I]; in float32,
    bfloat16 or float16. Each is a stacked tensor or an iterable of E tensors. With iterables, only one expert at a time
    is in memory besides the result.

    transposed   gate_up is [E, H, 2I], down is [E, I, H]
    interleaved  the rows of gate_up (and the elements of its bias) are gate0, up0, gate1, ...
    format       "fp32", "bf16": the value. "int8", "int4": q * s. "int4_asym": (q - z) * s. "mxfp4": E2M1 codes with an
                 E8M0 scale per 32 inputs. "fp8_block": E4M3 with a scale per 128 x 128
    group_size   inputs that share a scale; a multiple of 8 that divides H and I. Default: int8 the whole row, int4 32,
                 int4_asym 128
    scale_dtype  float32, bfloat16 or float16. Default: int8 float32, int4 bfloat16, int4_asym float16
    gate_up_bias, down_bias   [E, 2I] and [E, H], stored unchanged
    partitions   slices of the intermediate size, see `PackedExperts.partition`
    progress     called after every expert with (experts done, number of experts or None)

    Scales are rounded to their dtype first; codes are the nearest to w / s, ties to even, clamped. Raises ShapeError,
    TypeError, and ValueError for a group size that does not divide (the message lists those that would) and for a
    number that is not finite (with its index). The result is always on the CPU.
    """
    check_choice(_OP, "format", format, list(FORMATS))
    check_flag(_OP, "transposed", transposed)
    check_flag(_OP, "interleaved", interleaved)
    check_partitions(_OP, partitions)
    fmt = FORMATS[format]
    scales = check_scale_dtype(_OP, fmt, scale_dtype)
    stacks = _stacks(gate_up, down, transposed, interleaved)
    count, rows = zip_experts(_OP, stacks)
    with frozen():
        first = _matrices(next(rows), stacks, 0, transposed, interleaved)
        _check_sizes(stacks, first)
        hidden, intermediate = first[2].shape
        group = check_group(_OP, fmt, group_size, hidden, intermediate)
        layout = Layout(format, count or 1, hidden, intermediate, group, scales, (0, intermediate))
        biases = check_biases(_OP, gate_up_bias, down_bias, count, hidden, intermediate, interleaved)

        def codes(matrix: Tensor, name: str, e: int) -> Codes:
            return quantise(fmt, matrix, group, scales, f"{_OP}: expert {e}, {name}")

        experts = _experts(first, rows, stacks, transposed, interleaved, codes)
        del first
        nodes = check_nodes(_OP, partitions, None)
        weights = assemble(cut(layout, partitions, _OP), experts, progress, biases, nodes, counted=count is not None)
    if count is None:
        check_biases(_OP, gate_up_bias, down_bias, weights.layout.num_experts, hidden, intermediate, interleaved)
    return PackedExperts._of(*weights)


def _stacks(gate_up: Any, down: object, transposed: bool, interleaved: bool) -> list[Stack]:
    both, back = ("H 2I", "I H") if transposed else ("2I H", "H I")
    pair = (
        isinstance(gate_up, (tuple, list))
        and len(gate_up) == 2
        and not all(isinstance(value, Tensor) and value.dim() == 2 for value in gate_up)
    )
    if not pair:
        hinted = [Stack(_OP, "gate_up", gate_up, both, _FLOATS, _HINT)]
    elif interleaved:
        raise ValueError(f"{_OP}: interleaved=True needs gate_up in one tensor, but it is a pair (gate, up)")
    else:
        one = "H I" if transposed else "I H"
        names = ("gate", "up")
        hinted = [Stack(_OP, name, value, one, _FLOATS, _HINT) for name, value in zip(names, gate_up)]
    return [*hinted, Stack(_OP, "down", down, back, _FLOATS, _HINT)]


def _experts(
    first: tuple[Tensor, ...],
    rows: Iterator[tuple[Tensor, ...]],
    stacks: list[Stack],
    transposed: bool,
    interleaved: bool,
    codes: Callable[[Tensor, str, int], Codes],
) -> Iterator[Expert]:
    matrices: tuple[Tensor, ...] | None = first
    del first
    e = 0
    while matrices is not None:
        expert = Expert(*(codes(matrix, name, e) for matrix, name in zip(matrices, ("gate", "up", "down"))))
        del matrices
        yield expert
        del expert
        e += 1
        row = next(rows, None)
        matrices = None if row is None else _matrices(row, stacks, e, transposed, interleaved)
        del row


def _matrices(
    row: tuple[Tensor, ...], stacks: list[Stack], e: int, transposed: bool, interleaved: bool
) -> tuple[Tensor, ...]:
    """gate [I, H], up [I, H] and down [H, I] of expert e, from its tensors in `row`; checks that they are finite."""
    for tensor, stack in zip(row, stacks):
        check_finite(_OP, f"{stack.name} of expert {e}", tensor)
    turned = tuple(t.t() for t in row) if transposed else row
    if len(turned) == 3:
        return turned
    both, down = turned
    half = both.shape[0] // 2
    gate, up = (both[0::2], both[1::2]) if interleaved else (both[:half], both[half:])
    return gate, up, down


def _check_sizes(stacks: list[Stack], first: tuple[Tensor, ...]) -> None:
    gate, up, down = first
    shapes = {stack.name: list(stack.shape or ()) for stack in stacks}
    lines = [
        f"  {name + ':':9}{shape}, expected [{', '.join(stack.dims)}]"
        for (name, shape), stack in zip(shapes.items(), stacks)
    ]

    def fail(problem: str) -> None:
        hint = ""
        transposed = stacks[-1].dims == ["I", "H"]
        if _fits(tuple(s if transposed else reversed(s)) for s in shapes.values()):
            hint = f"\n  these shapes fit with transposed={not transposed}"
        raise ShapeError("\n".join([f"{_OP}: {problem}; shapes of expert 0:", *lines]) + hint)

    if 0 in gate.shape or 0 in down.shape:
        fail("a size is 0")
    if gate.shape[0] != up.shape[0] or (len(stacks) == 3 and gate.shape != up.shape):
        fail(
            "gate and up differ" if len(stacks) == 3 else f"gate_up has {len(gate) + len(up)} rows, not an even number"
        )
    if (gate.shape[0], gate.shape[1]) != (down.shape[1], down.shape[0]):
        fail(f"gate is [I={gate.shape[0]}, H={gate.shape[1]}], but down is [H={down.shape[0]}, I={down.shape[1]}]")


def _fits(shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether the shapes of (gate_up, down) or (gate, up, down) are consistent: [2I, H] or [I, H], with [H, I]."""
    *fronts, (hidden, intermediate) = shapes
    rows = 2 * intermediate if len(fronts) == 1 else intermediate
    return all(front == (rows, hidden) for front in fronts)


def check_biases(
    op: str, gate_up: Any, down: Any, count: int | None, hidden: int, intermediate: int, interleaved: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Checked copies of the biases, gate's elements before up's. The caller may later change its own tensors."""
    kept: list[Tensor | None] = []
    for name, bias, width in (("gate_up_bias", gate_up, 2 * intermediate), ("down_bias", down, hidden)):
        if bias is None:
            kept.append(None)
            continue
        if isinstance(bias, (list, tuple)) and all(isinstance(b, Tensor) for b in bias) and bias:
            with torch.autocast(bias[0].device.type, enabled=False):  # autocast cannot stack float16 on a CPU
                bias = torch.stack([b.detach() for b in bias])
        check_tensor(op, name, bias)
        check_dtype(op, name, bias, _FLOATS)
        if bias.is_meta:
            raise ValueError(f"{op}: {name} is on the meta device, which holds no data; load it first")
        rows = bias.shape[0] if count is None and bias.dim() else count
        if tuple(bias.shape) != (rows, width):
            raise ShapeError(
                f"{op}: {name} is {list(bias.shape)}, expected [{'E' if count is None else count}, {width}]"
            )
        bias = bias.detach().cpu().clone(memory_format=torch.contiguous_format)
        check_finite(op, name, bias)
        if name == "gate_up_bias" and interleaved:
            bias = side_by_side((bias[:, 0::2], bias[:, 1::2]), 1)
        kept.append(bias)
    return kept[0], kept[1]
