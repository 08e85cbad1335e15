"""Importers of weights that were quantised elsewhere: one function per layout, which keeps every code.

Each argument is a stacked tensor [E, ...] or an iterable of E tensors. Codes, zeros and scales keep their bits, and
scales keep their dtype. A tensor whose shape or dtype does not match the layout raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_choice, kind
from .assembly import PROJECTIONS, Progress, assemble, check_nodes, cut, layout_of
from .experts import PackedExperts
from .formats import FORMATS, FP8_BLOCK, Codes, nibbles
from .inputs import Stack, check_finite, check_flag, check_partitions, zip_experts
from .layout import Expert
from .memory import frozen
from .packing import check_biases
from .quantisation import check_group

Experts: TypeAlias = Tensor | Iterable[Tensor]
Parts: TypeAlias = Sequence[Experts]  # the tensors of one projection

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # column 8c + j starts at bit 4 * _AWQ_COLUMNS[j] of word c
_E8M0_NAN = 255


def from_k2(
    gate: Parts,
    up: Parts,
    down: Parts,
    *,
    group_size: int = 32,
    partitions: int = 1,
    progress: Progress | None = None,
) -> PackedExperts:
    """w = q * s, q in -8..7: imports Kimi-K2's layout (compressed-tensors "pack-quantized", symmetric) as format "int4"

    Each projection is (weight_packed int32 [E, out, in/8], weight_scale [E, out, in/group_size] in bfloat16, float16 or
    float32). Element 8j+i is in bits 4i..4i+3 of word j as q + 8. partitions, progress: as in `pack`.
    Raises ShapeError, TypeError and ValueError with the tensor's name.
    """
    op = "experts.from_k2"
    parts = (("weight_packed", "out in/8", (torch.int32,)), ("weight_scale", "out in/group", _FLOATS))
    hint = "; for (qweight, qzeros, scales), with zeros, use experts.from_awq"

    def read(name: str, e: int, packed: Tensor, scale: Tensor) -> Codes:
        where = f"{name}'s weight_scale of expert {e}"
        rows, inputs = packed.shape[0], packed.shape[1] * 8
        group = _group(op, "int4", group_size, name, rows, inputs)
        _check_scale(op, where, scale, (rows, inputs // group), f"weight_packed {list(packed.shape)}", inputs)
        check_finite(op, where, scale)
        # flipping the highest bit of q + 8 gives q in two's complement
        return Codes(packed.contiguous().view(torch.uint8) ^ 0x88, scale)

    stacks = _stacks(op, (gate, up, down), parts, hint)
    return _imported(op, "int4", group_size, stacks, len(parts), read, partitions, progress)


def from_awq(
    gate: Parts,
    up: Parts,
    down: Parts,
    *,
    group_size: int = 128,
    partitions: int = 1,
    progress: Progress | None = None,
) -> PackedExperts:
    """w = (q - z) * s, q and z in 0..15: imports the GEMM layout of AutoAWQ as format "int4_asym"

    Each projection is (qweight int32 [E, in, out/8], qzeros int32 [E, in/group_size, out/8], scales float16
    [E, in/group_size, out]): inputs first, and bits 4i..4i+3 of word c hold column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i],
    also in qzeros. Zeros have no offset (GPTQ adds 1 to them). partitions, progress: as in `pack`.
    Raises ShapeError, TypeError and ValueError with the tensor's name.
    """
    op = "experts.from_awq"
    parts = (
        ("qweight", "in out/8", (torch.int32,)),
        ("qzeros", "in/group out/8", (torch.int32,)),
        ("scales", "in/group out", (torch.float16,)),
    )
    hint = "; for (weight_packed, weight_scale), without zeros, use experts.from_k2"

    def read(name: str, e: int, packed: Tensor, zeros: Tensor, scale: Tensor) -> Codes:
        inputs, rows = packed.shape[0], packed.shape[1] * 8
        group = _group(op, "int4_asym", group_size, name, rows, inputs)
        value_text = f"qweight {list(packed.shape)}"
        where = f"{name}'s scales of expert {e}"
        _check_scale(op, where, scale, (inputs // group, rows), value_text, inputs, along=0)
        _check_scale(
            op, f"{name}'s qzeros of expert {e}", zeros, (inputs // group, rows // 8), value_text, inputs, along=0
        )
        check_finite(op, where, scale)
        return Codes(
            nibbles(awq_columns(packed).t()).contiguous(), scale.t().contiguous(), awq_columns(zeros).t().contiguous()
        )

    stacks = _stacks(op, (gate, up, down), parts, hint)
    return _imported(op, "int4_asym", group_size, stacks, len(parts), read, partitions, progress)


def from_fp8_block(
    gate: Parts, up: Parts, down: Parts, *, partitions: int = 1, progress: Progress | None = None
) -> PackedExperts:
    """w = q * weight_scale_inv, one scale per 128 x 128: imports DeepSeek-V3's layout as format "fp8_block"

    Each projection is (weight float8_e4m3fn [E, out, in], weight_scale_inv float32 [E, ceil(out/128), ceil(in/128)]).
    Despite its name the scale is multiplied: checkpoints are written that way. partitions, progress: as in `pack`.
    Raises ShapeError, TypeError and ValueError with the tensor's name.
    """
    op = "experts.from_fp8_block"
    parts = (
        ("weight", "out in", (torch.float8_e4m3fn,)),
        ("weight_scale_inv", "ceil(out/128) ceil(in/128)", (torch.float32,)),
    )

    def read(name: str, e: int, weight: Tensor, scale: Tensor) -> Codes:
        where = f"{name}'s weight_scale_inv of expert {e}"
        blocks = (-(-weight.shape[0] // FP8_BLOCK), -(-weight.shape[1] // FP8_BLOCK))
        _check_scale(op, where, scale, blocks, f"weight {list(weight.shape)}")
        check_finite(op, where, scale)
        _check_no_nan(op, f"{name}'s weight of expert {e}", weight)
        return Codes(weight.contiguous(), scale.contiguous())

    stacks = _stacks(op, (gate, up, down), parts, "; for unquantised weights use experts.pack")
    return _imported(op, "fp8_block", FP8_BLOCK, stacks, len(parts), read, partitions, progress)


def from_mxfp4(
    gate_up_blocks: Experts,
    gate_up_scales: Experts,
    down_blocks: Experts,
    down_scales: Experts,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = True,
    partitions: int = 1,
    progress: Progress | None = None,
) -> PackedExperts:
    """w = E2M1(code) * 2^(scale - 127): imports gpt-oss's layout of OCP MXFP4 as format "mxfp4"

    blocks uint8 [E, out, in/32, 16], the low nibble first; scales uint8 (E8M0) [E, out, in/32]. interleaved=True, as in
    gpt-oss: rows of gate_up and elements of its bias are gate0, up0, gate1, ...; False: gate's rows, then up's.
    partitions, progress: as in `pack`. Raises ShapeError, TypeError and ValueError with the tensor's name.
    """
    op = "experts.from_mxfp4"
    check_flag(op, "interleaved", interleaved)
    uint8 = (torch.uint8,)
    tensors = (gate_up_blocks, gate_up_scales, down_blocks, down_scales)
    names = ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")
    dims = ("2I H/32 16", "2I H/32", "H I/32 16", "H I/32")
    stacks = [Stack(op, *argument, uint8) for argument in zip(names, tensors, dims)]

    def whole(name: str, e: int, blocks: Tensor, scale: Tensor) -> Codes:
        if blocks.shape[-1] != 16:
            raise ShapeError(f"{op}: {name}_blocks of expert {e} is {list(blocks.shape)}, expected 16 bytes at the end")
        where = f"{name}_scales of expert {e}"
        _check_scale(op, where, scale, (blocks.shape[0], blocks.shape[1]), f"{name}_blocks {list(blocks.shape)}")
        _check_no_e8m0_nan(op, where, scale)
        return Codes(blocks.flatten(1), scale)

    def expert(e: int, row: tuple[Tensor, ...]) -> Expert:
        both, down, scale = whole("gate_up", e, *row[:2]), whole("down", e, *row[2:]), row[1]
        rows = len(both.codes)
        if rows % 2:
            raise ShapeError(f"{op}: gate_up_blocks of expert {e} has {rows} rows, not an even number: gate and up")
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(rows // 2), slice(rows // 2, None))
        return Expert(Codes(both.codes[gate], scale[gate]), Codes(both.codes[up], scale[up]), down)

    biases = (gate_up_bias, down_bias, interleaved)
    return _built(op, "mxfp4", 32, stacks, expert, partitions, progress, biases)


def from_codes(
    gate: Parts,
    up: Parts,
    down: Parts,
    *,
    format: str,
    group_size: int | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    partitions: int = 1,
    progress: Progress | None = None,
) -> PackedExperts:
    """w = q * s, or (q - z) * s: imports codes that are in one of our formats already, whatever wrote them

    Each projection is a tuple of tensors, row by row, as `PackedExperts.save` writes them. Four-bit codes are two in a
    byte, the even input in the low nibble; s are scales in bfloat16, float16 or float32 [E, out, in/group_size].

    int8        (q int8 [E, out, in], s); group_size None: one scale per row
    int4        (q uint8 [E, out, in/2], s), q in two's complement; group_size None: 32
    int4_asym   (q uint8 [E, out, in/2], s, z uint8 [E, out, in/group_size] of 0..15); group_size None: 128
    mxfp4       (E2M1 codes uint8 [E, out, in/2], E8M0 scales uint8 [E, out, in/32])
    fp8_block   (q float8_e4m3fn [E, out, in], s float32 [E, ceil(out/128), ceil(in/128)])

    Biases, partitions and progress: as in `pack`. Raises ShapeError, TypeError and ValueError with the tensor's name.
    """
    op = "experts.from_codes"
    check_choice(op, "format", format, [name for name, fmt in FORMATS.items() if fmt.scales])
    fmt = FORMATS[format]
    group = fmt.group if group_size is None else group_size
    if fmt.fixed:
        check_group(op, fmt, group_size, 32, 32)
    blocks = fmt.name == "fp8_block"
    parts: tuple[tuple[str, str, object], ...] = (
        ("codes", "out in/2" if fmt.per_code == 2 else "out in", (fmt.codes,)),
        ("scales", "ceil(out/128) ceil(in/128)" if blocks else "out in/group", fmt.scales),
    )
    if fmt.zeros:
        parts += (("zeros", "out in/group", (torch.uint8,)),)

    def read(name: str, e: int, codes: Tensor, scale: Tensor, zeros: Tensor | None = None) -> Codes:
        rows, inputs = codes.shape[0], codes.shape[1] * fmt.per_code
        if group is not None and not fmt.fixed:
            _group(op, format, group, name, rows, inputs)
        wanted = (rows, inputs // (group or max(inputs, 1)))
        if blocks:
            wanted = (-(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        where, actual = f"{name}'s scales of expert {e}", f"codes {list(codes.shape)}"
        _check_scale(op, where, scale, wanted, actual, 0 if fmt.fixed else inputs)
        if scale.dtype == torch.uint8:
            _check_no_e8m0_nan(op, where, scale)
        else:
            check_finite(op, where, scale)
        if blocks:
            _check_no_nan(op, f"{name}'s codes of expert {e}", codes)
        if zeros is not None:
            _check_scale(op, f"{name}'s zeros of expert {e}", zeros, wanted, actual)
            if zeros.numel() and zeros.max() > 15:
                place = (zeros > 15).nonzero()[0].tolist()
                actual = f"is {int(zeros[tuple(place)])} at {place}"
                raise ValueError(f"{op}: {name}'s zeros of expert {e} {actual}; a zero point is in 0..15")
        return Codes(codes.contiguous(), scale.contiguous(), None if zeros is None else zeros.contiguous())

    stacks = _stacks(op, (gate, up, down), parts, "; for unquantised weights use experts.pack")
    biases = (gate_up_bias, down_bias, False)
    return _imported(op, format, group, stacks, len(parts), read, partitions, progress, biases)


# -- shared helpers ---------------------------------------------------------------------------------------------------


def _stacks(op: str, projections: tuple[Any, ...], parts: tuple[tuple[str, str, Any], ...], hint: str) -> list[Stack]:
    """One Stack for each tensor of each projection, in order."""
    names = ", ".join(part[0] for part in parts)
    stacks = []
    for name, tensors in zip(PROJECTIONS, projections):
        if not isinstance(tensors, (tuple, list)) or len(tensors) != len(parts):
            value_text = f"{kind(tensors)} of {len(tensors)}" if isinstance(tensors, (tuple, list)) else kind(tensors)
            raise TypeError(f"{op}: {name} is {value_text}, expected a tuple ({names}){hint}")
        for (part, dims, dtypes), value in zip(parts, tensors):
            stacks.append(Stack(op, f"{name}'s {part}", value, dims, dtypes, hint))
    return stacks


def _imported(
    op: str,
    format: str,
    group: int | None,
    stacks: list[Stack],
    each: int,
    read: Callable[..., Codes],
    partitions: int,
    progress: Progress | None,
    biases: tuple[object, object, bool] = (None, None, False),
) -> PackedExperts:
    """Import experts whose three projections have `each` tensors; `read` converts one matrix at a time."""

    def expert(e: int, row: tuple[Tensor, ...]) -> Expert:
        return Expert(*(read(name, e, *row[each * at : each * (at + 1)]) for at, name in enumerate(PROJECTIONS)))

    return _built(op, format, group, stacks, expert, partitions, progress, biases)


def _built(
    op: str,
    format: str,
    group: int | None,
    stacks: list[Stack],
    expert: Callable[[int, tuple[Tensor, ...]], Expert],
    partitions: int,
    progress: Progress | None,
    biases: tuple[object, object, bool],
) -> PackedExperts:
    count, rows = zip_experts(op, stacks)
    return imported(op, format, group, count, _converted(rows, expert), partitions, progress, biases)


def _converted(
    rows: Iterator[tuple[Tensor, ...]], expert: Callable[[int, tuple[Tensor, ...]], Expert]
) -> Iterator[Expert]:
    e = 0
    for row in rows:
        packed = expert(e, row)
        del row  # free it before the next one is made
        yield packed
        del packed
        e += 1


def imported(
    op: str,
    format: str,
    group: int | None,
    count: int | None,
    experts: Iterator[Expert],
    partitions: int,
    progress: Progress | None = None,
    biases: tuple[object, object, bool] = (None, None, False),
) -> PackedExperts:
    """Pack experts whose matrices are in codes of `format` already, one at a time; count None: not known before."""
    check_partitions(op, partitions)
    with frozen():
        first = next(experts)
        layout = layout_of(op, format, group, count or 1, first)
        hidden, intermediate = layout.hidden_size, layout.intermediate_size
        gate_up_bias, down_bias, interleaved = biases
        kept = check_biases(op, gate_up_bias, down_bias, count, hidden, intermediate, interleaved)
        every = _following(first, experts)
        del first
        nodes = check_nodes(op, partitions, None)
        weights = assemble(cut(layout, partitions, op), every, progress, kept, nodes, counted=count is not None)
    if count is None:
        check_biases(op, gate_up_bias, down_bias, weights.layout.num_experts, hidden, intermediate, interleaved)
    return PackedExperts._of(*weights)


def _following(first: Expert, experts: Iterator[Expert]) -> Iterator[Expert]:
    yield first
    del first
    for expert in experts:
        yield expert
        del expert  # free it before the next one is made


def _group(op: str, format: str, group_size: Any, name: str, rows: int, inputs: int) -> int:
    """`group_size` if it is a positive multiple of 8. That it divides both sizes is checked after the scales, whose
    shape shows the right group size."""
    if group_size is None:
        raise TypeError(f"{op}: group_size=None, expected an int: it cannot be derived from the codes")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 8 or group_size % 8:
        hidden, intermediate = (rows, inputs) if name == "down" else (inputs, rows)
        check_group(op, FORMATS[format], group_size, hidden, intermediate)
    return group_size


def _check_scale(
    op: str, name: str, tensor: Tensor, wanted: tuple[int, int], codes: str, inputs: int = 0, *, along: int = 1
) -> None:
    """Raise ShapeError unless `tensor` has the wanted shape.

    With `inputs`, the message gives the group_size that would match the tensor's size in dimension `along`.
    """
    if tuple(tensor.shape) == wanted:
        return
    groups = tensor.shape[along]
    fits = inputs and groups and inputs % groups == 0 and tensor.shape[1 - along] == wanted[1 - along]
    hint = f"; its shape fits group_size={inputs // groups}" if fits else ""
    raise ShapeError(f"{op}: {name} is {list(tensor.shape)}, but {codes} needs {list(wanted)}{hint}")


def _check_no_nan(op: str, where: str, weight: Tensor) -> None:
    """Raise ValueError with the first index where E4M3 codes are NaN."""
    nan = (weight.view(torch.uint8) & 0x7F) == 0x7F
    if nan.any():
        raise ValueError(f"{op}: {where} is nan at {nan.nonzero()[0].tolist()}; weights must be finite numbers")


def _check_no_e8m0_nan(op: str, where: str, scale: Tensor) -> None:
    if (scale == _E8M0_NAN).any():
        place = (scale == _E8M0_NAN).nonzero()[0].tolist()
        raise ValueError(f"{op}: {where} holds 255, which means NaN in E8M0, at {place}; scales must be finite numbers")


def awq_columns(words: Tensor) -> Tensor:
    """AWQ's int32 words [lines, columns / 8] -> uint8 codes [lines, columns], in order"""
    data = words.contiguous().view(torch.uint8)
    in_bits = torch.stack((data & 15, data >> 4), -1).view(words.shape[0], -1, 8)
    return in_bits[..., list(_AWQ_COLUMNS)].flatten(1)
