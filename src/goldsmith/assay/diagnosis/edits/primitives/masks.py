"""The primitives that edit masks: shifts, blocks along the diagonal, other values at masked places."""

from __future__ import annotations

import torch
from torch import Tensor

from ..golden_edit import OperatorCall

_COMPARES = {"lt": torch.le, "le": torch.lt, "gt": torch.ge, "ge": torch.gt}


def compare_otherwise(call: OperatorCall) -> Tensor:
    """<= for <, and the like."""
    return _COMPARES[call.name](*call.args)


def fill(m: Tensor, *, value: bool) -> Tensor:
    return torch.full_like(m, value)


def triangle(call: OperatorCall, *, diagonal: int) -> Tensor:
    return (torch.tril if call.name.startswith("tril") else torch.triu)(call.x, diagonal)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = mask.shape[-2:]
    return torch.arange(rows, device=mask.device)[:, None], torch.arange(columns, device=mask.device)


# (i, j, block) -> whether the golden's mask is kept there
REGIONS = {
    "on the diagonal": lambda i, j, b: i // b == j // b,
    "off the diagonal": lambda i, j, b: i // b != j // b,
    "before the row's block": lambda i, j, b: j < i // b * b,
}


def keep_blocks(mask: Tensor, *, region: str, block: int, elsewhere: bool) -> Tensor:
    """The mask in some blocks, and one value in all others."""
    i, j = _places(mask)
    return torch.where(REGIONS[region](i, j, block), mask, torch.full_like(mask, elsewhere))


def hidden(mask: Tensor, shape: tuple[int, ...], block: int, inverted: bool) -> Tensor:
    """The masked places, or those up to the end of each row's diagonal block."""
    m = (~mask if inverted else mask).expand(shape)
    if not block:
        return m
    i, j = _places(m)
    return m & (j < (i // block + 1) * block)


def hold(call: OperatorCall, *, block: int, c: float) -> Tensor:
    """Another number at masked places; block: only in the blocks on the diagonal."""
    inverted = call.name == "where"
    out = call.on(*call.args)
    region = hidden(call.args[0 if inverted else 1], tuple(out.shape), block, inverted)
    return torch.where(region, torch.full_like(out, c), out)


def keep_operand(call: OperatorCall, *, at: int) -> Tensor:
    return call.args[at].clone()
