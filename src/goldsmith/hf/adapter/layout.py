"""LoRA on experts in the layout of peft's files: pure functions of tensors.

peft adapts one parameter at a time: gate_up_proj with one A for gate and up, down_proj with an A of its own. Its
tensors are two-dimensional with different orders: A [r E, in] is expert-major, B [out, r E] is rank-major with the
expert index fastest.

If gate and up have separate A matrices (ranks r_g and r_u), the file holds one pair of rank r_g + r_u,

    A = [A_g; A_u]        B = [[B_g, 0], [0, B_u]]

so that B A = [B_g A_g; B_u A_u] plus zeros, and stock peft computes the same merged weights. A target without LoRA
has rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # A [E, r, in], B [E, out, r]


@dataclass(frozen=True)
class PeftFactors:
    """peft's LoRA of one parameter: A [E, r, in], B [E, out, r] with rows in the model's order, and the scaling."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


def swapped(pair: Pair) -> Pair:
    """The pair of the transposed product: (B A)^T = A^T B^T. Its own inverse."""
    return pair[1].transpose(1, 2), pair[0].transpose(1, 2)


def to_peft(a: Tensor, b: Tensor) -> Pair:
    """A [E, r, in] and B [E, out, r] -> lora_A.weight [r E, in] and lora_B.weight [out, r E]."""
    experts, rank, _ = a.shape
    return (
        a.reshape(experts * rank, a.shape[2]).contiguous(),
        b.permute(1, 2, 0).reshape(b.shape[1], rank * experts).contiguous(),
    )


def from_peft(a: Tensor, b: Tensor, num_experts: int) -> Pair:
    """lora_A.weight [r E, in] and lora_B.weight [out, r E] -> A [E, r, in] and B [E, out, r]."""
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
    """gate and up as one pair for gate_up_proj; None if neither has LoRA.

    The pair has one scaling. If gate and up differ, B of up is multiplied by the ratio (B of gate if gate's scaling
    is 0).
    """
    pairs = {name: factors[name] for name in ("gate", "up") if name in factors and factors[name][0].shape[1]}
    if not pairs:
        return None
    scale = next((scaling[name] for name in pairs if scaling[name]), 0.0)
    example = next(iter(pairs.values()))[1]
    experts, blocks = example.shape[0], []
    for name in ("gate", "up"):
        if name not in pairs:
            blocks.append(example.new_zeros(experts, intermediate_size, 0))
        else:
            ratio = scaling[name] / scale if scale else 1.0
            blocks.append(pairs[name][1] if ratio == 1 else pairs[name][1] * ratio)
    if shared and len(pairs) == 2:
        return PeftFactors(pairs["gate"][0], _rows(blocks[0], blocks[1], interleaved), scale)
    left, right = blocks[0].shape[2], blocks[1].shape[2]
    gate = torch.nn.functional.pad(blocks[0], (0, right))
    up = torch.nn.functional.pad(blocks[1], (left, 0))
    return PeftFactors(torch.cat([pair[0] for pair in pairs.values()], 1), _rows(gate, up, interleaved), scale)


def split(pair: PeftFactors, ranks: tuple[int, int] | None, *, interleaved: bool) -> dict[str, Pair]:
    """gate and up from peft's one pair: the inverse of `join`; `ranks` are (r_gate, r_up) before joining.

    Gate and up share the whole A, as in peft, if `ranks` is None or if B lacks the zeros that these ranks imply
    (another program trained it further).
    """
    b = pair.b
    middle = b.shape[1] // 2
    gate, up = (b[:, 0::2], b[:, 1::2]) if interleaved else (b[:, :middle], b[:, middle:])
    if ranks is not None and sum(ranks) == pair.rank:
        left = ranks[0]
        if not gate[:, :, left:].any() and not up[:, :, :left].any():
            parts = {
                "gate": (pair.a[:, :left], gate[:, :, :left]),
                "up": (pair.a[:, left:], up[:, :, left:]),
            }
            return {name: part for name, part in parts.items() if part[0].shape[1]}
    return {"gate": (pair.a, gate), "up": (pair.a, up)}


def _rows(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """Rows in the model's order: all gates before all ups, or interleaved."""
    return torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
