"""Quantisation of weights to codes, defined to the last bit, so that two implementations agree.

A scale is first rounded to its stored dtype. Codes are then the nearest to w / s (a division in float32, ties to even),
clamped. If the rounded scale is 0, every code is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.shapes import kind
from .formats import E2M1, FP8_BLOCK, SCALE_NAMES, Codes, Format, divisors, side_by_side

_E2M1_MAX = max(E2M1)
_E4M3_MAX = 448.0
_E8M0_BIAS = 127


_CHUNK = 1 << 19  # weights at a time: they stay in the cache between steps, and temporaries are small


def quantise(fmt: Format, weights: Tensor, group: int | None, scale_dtype: torch.dtype | None, where: str) -> Codes:
    """code = nearest(w / s), s = amax / largest code of each group: the codes of one matrix [rows, inputs]

    Weights are finite, in float32, bfloat16 or float16. Raises ValueError, whose message begins with `where`, if a
    scale overflows its dtype or a weight overflows bfloat16.
    """
    parts = [part for _, part in quantised_rows(fmt, weights, group, scale_dtype, where)]
    if len(parts) == 1:
        return parts[0]
    names = [name for name in ("codes", "scales", "zeros") if getattr(parts[0], name) is not None]
    return Codes(**{name: side_by_side([getattr(part, name) for part in parts]) for name in names})


def quantised_rows(
    fmt: Format, weights: Tensor, group: int | None, scale_dtype: torch.dtype | None, where: str
) -> Iterator[tuple[int, Codes]]:
    """`quantise` in parts of a multiple of 128 rows: (first row, its codes)"""
    rows, inputs = weights.shape
    step = max(_CHUNK // max(inputs, 1) // FP8_BLOCK, 1) * FP8_BLOCK
    for at in range(0, rows, step):
        try:
            yield at, _quantise(fmt, weights[at : at + step], group, scale_dtype)
        except _Overflow as overflow:
            raise ValueError(f"{where} row {at + overflow.row}, {overflow}") from None


class _Overflow(Exception):
    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row = row


def _quantise(fmt: Format, weights: Tensor, group: int | None, scale_dtype: torch.dtype | None) -> Codes:
    if fmt.name == "fp32":
        return Codes(weights.to(torch.float32))
    if fmt.name == "bf16":
        return Codes(_bf16(weights))
    w = weights.to(torch.float32).contiguous()
    if fmt.name == "fp8_block":
        return _fp8_block(w)
    grouped = w.reshape(w.shape[0], -1, group or w.shape[1])
    if fmt.name == "mxfp4":
        return _mxfp4(grouped)
    zeros = None
    if fmt.zeros:
        low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
        scales = _rounded((high - low) / 15, scale_dtype)
        s = _divisor(scales)
        zeros = (-low / s).round_().clamp_(0, 15)
        codes = (grouped / s.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15)
        zeros = zeros.to(torch.uint8)
    else:
        largest = 127 if fmt.bits == 8 else 7
        scales = _rounded(grouped.abs().amax(-1) / largest, scale_dtype)
        codes = (grouped / _divisor(scales).unsqueeze(-1)).round_().clamp_(-127 if fmt.bits == 8 else -8, largest)
    codes = codes.to(torch.int8).view(w.shape)
    return Codes(codes if fmt.bits == 8 else _nibbles(codes), scales, zeros)


def check_group(op: str, fmt: Format, group_size: int | None, hidden: int, intermediate: int) -> int | None:
    """`checked_group` for the experts of a layer."""
    return checked_group(op, fmt, group_size, {"hidden_size": hidden, "intermediate_size": intermediate})


def fitting_group(fmt: Format, *inputs: int) -> int | None:
    """The format's group size; if it does not divide these inputs, the largest smaller one that does."""
    if fmt.fixed or fmt.group is None:
        return None
    common = [size for size in divisors(math.gcd(*inputs)) if size <= fmt.group]
    return max(common, default=None)


def checked_group(op: str, fmt: Format, group_size: int | None, inputs: Mapping[str, int]) -> int | None:
    """The group size to use: `group_size`, or the format's default. It divides the inputs of every matrix, by name.

    The ValueError lists sizes that would work.
    """
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int)):
        raise TypeError(f"{op}: group_size={group_size!r} is {kind(group_size)}, expected an int or None")
    if fmt.fixed:
        if group_size not in (None, fmt.group):
            own = "no groups" if fmt.group is None else f"groups of {fmt.group}, which are fixed"
            raise ValueError(
                f"{op}: format={fmt.name!r} takes no group_size, got {group_size}: it has {own}. Omit it, or use "
                "int8, int4 or int4_asym"
            )
        if fmt.bits != 4:
            return fmt.group
    group = fmt.group if group_size is None else group_size
    if group is None:
        return None
    if group >= 8 and group % 8 == 0 and all(size % group == 0 for size in inputs.values()):
        return group
    common = divisors(math.gcd(*inputs.values()))
    would = f"these would work: {', '.join(map(str, common))}" if common and not fmt.fixed else "none would work"
    others = "" if common and not fmt.fixed else "; int8 without group_size, fp8_block, bf16 and fp32 accept any sizes"
    raise ValueError(
        f"{op}: group_size={group}{'' if group_size is not None else f' (of {fmt.name})'} must be a multiple of 8 "
        f"that divides {' and '.join(f'{name}={size}' for name, size in inputs.items())}; {would}{others}"
    )


def check_scale_dtype(op: str, fmt: Format, scale_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of scales to use: `scale_dtype`, or the format's default."""
    if scale_dtype is None:
        return fmt.scales[0] if fmt.scales else None
    if scale_dtype not in fmt.scales:
        wanted = ", ".join(str(d) for d in fmt.scales) or "none (it has no scales)"
        raise ValueError(f"{op}: format={fmt.name!r} does not allow scale_dtype={scale_dtype!r}; it supports: {wanted}")
    return scale_dtype


def _bf16(weights: Tensor) -> Tensor:
    codes = weights.to(torch.bfloat16)
    if weights.dtype == torch.float32 and not all(end.isfinite() for end in torch.aminmax(codes)):
        row, k = (~codes.isfinite()).nonzero()[0].tolist()
        weight = weights[row, k].item()
        raise _Overflow(row, f"input {k}: {weight:.6g} overflows bfloat16; use format='fp32', or scale the weights")
    return codes


def _rounded(scales: Tensor, dtype: torch.dtype | None) -> Tensor:
    rounded = scales.to(dtype)
    if not rounded.isfinite().all():
        row, group = (~rounded.isfinite()).nonzero()[0].tolist()
        name = SCALE_NAMES[rounded.dtype]
        raise _Overflow(
            row,
            f"group {group}: its scale {scales[row, group].item():.6g} overflows {name}; use a wider scale_dtype "
            "(torch.bfloat16, torch.float32), or format='bf16'",
        )
    return rounded


def _divisor(scales: Tensor) -> Tensor:
    """The scales in float32, with 1 in place of 0: such weights are so small that divided by 1 their code is 0."""
    s = scales.to(torch.float32)
    return s.masked_fill(s == 0, 1.0)


def _mxfp4(grouped: Tensor) -> Codes:
    amax = grouped.abs().amax(-1)
    # frexp gives amax = m * 2^x with m in [1/2, 1): floor(log2 amax) is x - 1, exactly
    exponent = (torch.frexp(amax).exponent - 1 - 2 + _E8M0_BIAS).clamp_(0, 254).masked_fill_(amax == 0, 0)
    scale = torch.exp2(exponent.to(torch.float64) - _E8M0_BIAS).to(torch.float32).unsqueeze(-1)
    values = grouped / scale
    signs = (values.view(torch.int32) >> 28).bitwise_and_(8)
    sizes = values.abs_()
    # E2M1 has steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6, where it saturates: add up the steps of each range
    steps = (sizes * 2).clamp_(max=4).round_()
    steps += sizes.clamp(2, 4).round_()
    steps += (sizes / 2).clamp_(2, _E2M1_MAX / 2).round_()
    codes = (steps.to(torch.int32) - 4).add_(signs).to(torch.int8)
    if (none := amax == 0).any():
        codes.masked_fill_(none.unsqueeze(-1), 0)
    return Codes(_nibbles(codes.flatten(1)), exponent.to(torch.uint8))


def _fp8_block(w: Tensor) -> Codes:
    rows, inputs = w.shape
    down, across = -rows % FP8_BLOCK, -inputs % FP8_BLOCK
    blocks = pad(w, (0, across, 0, down)).view((rows + down) // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / _E4M3_MAX
    codes = (blocks / _divisor(scales)[:, None, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    if (none := scales == 0).any():
        codes.masked_fill_(none[:, None, :, None], 0)  # also clears -0
    return Codes(codes.view(rows + down, -1)[:rows, :inputs].to(torch.float8_e4m3fn), scales)


def _nibbles(codes: Tensor) -> Tensor:
    """int8 [rows, n], four bits each -> uint8 [rows, n / 2], even elements low: a pair is one little-endian int16"""
    pairs = codes.view(torch.int16)
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
