"""Wrong fill values at masked places, and masks applied per block, where a kernel skips blocks it takes for masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import replaced
from ..change import Change, with_arguments, with_result

_BLOCKS = (4, 8, 16, 32, 64, 128)
_BOTH = ("wrong_mask", "off_by_one")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """Changes of `masked_fill` and `where`."""
    if call.name not in ("masked_fill", "where") or len(call.args) < 3 or not isinstance(call.out, Tensor):
        return
    at = 0 if call.name == "where" else 1
    mask, value = call.args[at], call.args[2]
    if not isinstance(mask, Tensor) or not mask.numel() or not call.out.is_floating_point():
        return
    fill = value if not isinstance(value, Tensor) else float(value) if value.numel() == 1 else None
    if at == 0:
        yield from _unguarded(call, mask)
    if fill is not None:
        yield from _filled(call, mask if call.name == "masked_fill" else ~mask, float(fill))
    if mask.dim() >= 2:
        yield from _by_blocks(call, at, mask)


def _filled(call: Node, hidden: Tensor, fill: float) -> Iterator[Change]:
    """Another number at masked places: a function applied too late to -inf, or 0.

    If fully masked blocks are skipped, only the masked places of the diagonal blocks change.
    """
    for where, region in _regions(call, hidden):

        def holds(c: float, region: Tensor = region) -> Changed:
            return with_result(lambda out: torch.where(region, torch.full_like(out, c), out))

        for c in (0.0, 1.0) if fill == 0 else (0.0,):
            if c != fill:
                text = f"masked places of {call.expression}{where} hold {c:g} instead of {fill:g}"
                yield Change("wrong_mask", text, call.index, holds(c), {"fill": c}, 0.6)
        if abs(fill) == torch.inf:
            text = f"masked places of {call.expression}{where} hold, instead of {fill:g},"
            yield Change("wrong_mask", text, call.index, holds, {}, 0.6, free=-1e-3)


def _unguarded(call: Node, mask: Tensor) -> Iterator[Change]:
    """Non-finite values at masked places, such as a mean of nothing, stay visible."""
    for i, at in ((1, ~mask), (2, mask)):
        behind = call.args[i]
        if isinstance(behind, Tensor) and behind.is_floating_point() and bool((~behind.isfinite() & at).any()):
            text = f"{call.operand(i) or 'an operand'} is not hidden by {call.expression} where it is not finite"
            change = with_arguments(lambda args, shown=i == 1: replaced(args, 0, torch.full_like(args[0], shown)))
            yield Change("empty_group", text, call.index, change, {}, 0.6, also=("wrong_mask",))


def _regions(call: Node, hidden: Tensor) -> Iterator[tuple[str, Tensor]]:
    hidden = hidden.expand(call.out.shape)
    yield "", hidden
    rows, columns = call.out.shape[-2:] if call.out.dim() > 1 else (1, 0)
    i = torch.arange(rows, device=hidden.device)[:, None]
    j = torch.arange(columns, device=hidden.device)
    for block in _BLOCKS:
        if block < columns and rows > 1:
            within = hidden & (j < (i // block + 1) * block)
            if not torch.equal(within, hidden):
                yield f" in the blocks of {block} on the diagonal", within


def _by_blocks(call: Node, at: int, mask: Tensor) -> Iterator[Change]:
    rows, columns = mask.shape[-2:]
    i = torch.arange(rows, device=mask.device)[:, None]
    j = torch.arange(columns, device=mask.device)
    hidden = torch.ones_like(mask) if call.name == "masked_fill" else torch.zeros_like(mask)
    for block in _BLOCKS:
        if block >= max(rows, columns):
            break
        kept: tuple[tuple[str, Callable[[], Tensor]], ...] = (
            ("the blocks on the diagonal are left out", lambda b=block: i // b != j // b),  # type: ignore[misc]
            ("only the blocks on the diagonal are left", lambda b=block: i // b == j // b),  # type: ignore[misc]
            ("the last block of columns of every row is left out",
             lambda b=block: j < torch.clamp(i // b * b, min=0)),  # type: ignore[misc]
        )  # fmt: skip
        for text, where in kept:
            new = torch.where(where(), mask, hidden)
            if torch.equal(new, mask):
                continue
            change = with_arguments(lambda args, m=new: replaced(args, at, m.expand_as(args[at])))
            label = f"of {call.expression} in blocks of {block}, {text}"
            yield Change("truncated_reduction", label, call.index, change, {"block": block}, 0.55, also=_BOTH)
