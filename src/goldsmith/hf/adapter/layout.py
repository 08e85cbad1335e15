"""The layout of LoRA on experts in peft's files, as functions of tensors alone.

peft adapts one parameter at a time: gate_up_proj with one A for gate and up, down_proj with its own. Its tensors are
two-dimensional, and lie differently: A [r E, in] is expert-major, B [out, r E] is rank-major with the expert fastest.

Gate and up with an A of their own (ranks r_g and r_u) are written as one pair of rank r_g + r_u,

    A = [A_g; A_u]        B = [[B_g, 0], [0, B_u]]

so that B A is [B_g A_g; B_u A_u], zeros added: stock peft makes the same merged weights. A target that is off has
rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # A [E, r, in], B [E, out, r]


@dataclass(frozen=True)
class PeftFactors:
    """What peft knows of one parameter: A [E, r, in], B [E, out, r] in the model's order of rows, and the scaling."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


def to_peft(a: Tensor, b: Tensor) -> Pair:
    """lora_A.weight [r E, in] and lora_B.weight [out, r E] of A [E, r, in] and B [E, out, r]."""
    experts, rank, _ = a.shape
    return (
        a.reshape(experts * rank, a.shape[2]).contiguous(),
        b.permute(1, 2, 0).reshape(b.shape[1], rank * experts).contiguous(),
    )


def from_peft(a: Tensor, b: Tensor, num_experts: int) -> Pair:
    """A [E, r, in] and B [E, out, r] of lora_A.weight [r E, in] and lora_B.weight [out, r E]."""
    rank = a.shape[0] // num_experts
    return (
        a.reshape(num_experts, rank, a.shape[1]),
        b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1).contiguous(),
    )


def join(
    factors: Mapping[str, Pair],
    scaling: Mapping[str, float],
    intermediate_size: int,
    *,
    interleaved: bool,
    shared: bool,
) -> PeftFactors | None:
    """gate and up as peft's one pair for gate_up_proj; None when both are off.

    One scaling serves both: where they differ, the ratio goes into up's B, or into gate's where gate's scaling is 0.
    """
    given = {name: factors[name] for name in ("gate", "up") if name in factors and factors[name][0].shape[1]}
    if not given:
        return None
    scale = next((scaling[name] for name in given if scaling[name]), 0.0)
    some = next(iter(given.values()))[1]
    experts, blocks = some.shape[0], []
    for name in ("gate", "up"):
        if name not in given:
            blocks.append(some.new_zeros(experts, intermediate_size, 0))
        else:
            ratio = scaling[name] / scale if scale else 1.0
            blocks.append(given[name][1] if ratio == 1 else given[name][1] * ratio)
    if shared and len(given) == 2:
        return PeftFactors(given["gate"][0], _rows(blocks[0], blocks[1], interleaved), scale)
    left, right = blocks[0].shape[2], blocks[1].shape[2]
    gate = torch.nn.functional.pad(blocks[0], (0, right))
    up = torch.nn.functional.pad(blocks[1], (left, 0))
    return PeftFactors(torch.cat([pair[0] for pair in given.values()], 1), _rows(gate, up, interleaved), scale)


def split(half: PeftFactors, ranks: tuple[int, int] | None, *, interleaved: bool) -> dict[str, Pair]:
    """gate and up out of peft's one pair; `ranks` is what `join` made it of, (r_gate, r_up).

    Without ranks, or where B does not have the zeros that they promise (another program trained it on), gate and up
    share the whole A, as they do in peft.
    """
    b = half.b
    middle = b.shape[1] // 2
    gate, up = (b[:, 0::2], b[:, 1::2]) if interleaved else (b[:, :middle], b[:, middle:])
    if ranks is not None and sum(ranks) == half.rank:
        left = ranks[0]
        if not gate[:, :, left:].any() and not up[:, :, :left].any():
            parts = {
                "gate": (half.a[:, :left], gate[:, :, :left]),
                "up": (half.a[:, left:], up[:, :, left:]),
            }
            return {name: pair for name, pair in parts.items() if pair[0].shape[1]}
    return {"gate": (half.a, gate), "up": (half.a, up)}


def _rows(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """Rows in the model's order: all gates before all ups, or alternating."""
    return torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
