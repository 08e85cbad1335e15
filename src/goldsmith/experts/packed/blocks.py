"""A base over blocks that the caller owns: each block holds one expert's three matrices side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_choice, check_dtype, check_tensor
from .assembly import PackedWeights
from .formats import FORMATS
from .inputs import check_count
from .layout import Layout
from .memory import frozen
from .quantisation import check_group, check_scale_dtype

_OP = "PackedExperts.from_blocks"


def from_blocks(
    blocks: Tensor,
    hidden_size: int,
    intermediate_size: int,
    format: str,
    group_size: int | None,
    scale_dtype: torch.dtype | None,
    biases: tuple[Tensor | None, Tensor | None],
) -> PackedWeights:
    check_choice(_OP, "format", format, list(FORMATS))
    check_count(_OP, "hidden_size", hidden_size)
    check_count(_OP, "intermediate_size", intermediate_size)
    fmt = FORMATS[format]
    scales = check_scale_dtype(_OP, fmt, scale_dtype)
    group = check_group(_OP, fmt, group_size, hidden_size, intermediate_size)
    check_tensor(_OP, "blocks", blocks)
    check_dtype(_OP, "blocks", blocks, (torch.uint8,))
    one = Layout(format, 1, hidden_size, intermediate_size, group, scales, (0, intermediate_size))
    least = one.expert_nbytes
    if blocks.dim() != 2 or blocks.shape[0] < 1 or blocks.shape[1] < least or blocks.shape[1] % 64:
        raise ShapeError(
            f"{_OP}: blocks is {list(blocks.shape)}, expected [E, bytes], bytes a multiple of 64 of at least {least}, "
            f"the size of an expert in {format} with hidden_size={hidden_size}, intermediate_size={intermediate_size}"
        )
    if not blocks.is_contiguous():
        raise ValueError(f"{_OP}: blocks is not contiguous; pass the whole tensor, with the bytes between the experts")
    experts, block = blocks.shape
    layout = Layout(format, experts, hidden_size, intermediate_size, group, scales, one.cuts, block)
    for name, bias, width in (
        ("gate_up_bias", biases[0], 2 * intermediate_size),
        ("down_bias", biases[1], hidden_size),
    ):
        if bias is None:
            continue
        check_tensor(_OP, name, bias)
        check_dtype(_OP, name, bias, (torch.float32, torch.bfloat16, torch.float16))
        if tuple(bias.shape) != (experts, width):
            raise ShapeError(f"{_OP}: {name} is {list(bias.shape)}, expected [{experts}, {width}]")
    with frozen():
        blob = blocks.detach().view(-1)
        gate_up_bias, down_bias = (None if bias is None else bias.detach() for bias in biases)
        return PackedWeights(layout, blob, blob, gate_up_bias, down_bias)


def block_of(layout: Layout, gate_up: Tensor, down: Tensor, expert: int) -> Tensor:
    if isinstance(expert, bool) or not isinstance(expert, int):
        raise TypeError(f"PackedExperts.block: expert={expert!r} is of type {type(expert).__name__}, expected a number")
    if not 0 <= expert < layout.num_experts:
        raise IndexError(f"PackedExperts.block: expert={expert}, expected 0..{layout.num_experts - 1}")
    if layout.partitions > 1:
        raise ValueError(
            f"PackedExperts.block: this base has {layout.partitions} slices; use base.partition(1), which has one slice"
        )
    matrices = []
    for which, blob in (("gate_up", gate_up), ("down", down)):
        (place,) = layout.matrices(which)
        at = place.offset + expert * place.expert_stride
        matrices.append(blob[at : at + len(place.parts) * place.panels * place.panel_bytes])
    return torch.cat(matrices)
