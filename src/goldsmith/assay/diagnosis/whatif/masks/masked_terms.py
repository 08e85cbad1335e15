"""A mask of the golden applied to one tensor too many: an addend counts only where another one should.

For example, saturated codes do not contribute to a scale's gradient, and ignored tokens do not contribute to a
regulariser. The mask is computed in the changed run, so that the change can be tested on other draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating
from ..change import Change

_MASKS, _MOST = 6, 24
_LIMITS = frozenset("clamp clamp_min clamp_max relu hardtanh".split())
_HIDDEN = frozenset("mul div add sub neg exp log pow square sqrt rsqrt sigmoid tanh rsub".split())


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    masks: list[tuple[Node, Tensor]] = []
    for call in calls:
        mask = _mask(call, call.args, call.out)
        new = mask is not None and bool(mask.any()) and not bool(mask.all())
        if mask is not None and new and not any(m.shape == mask.shape and torch.equal(m, mask) for _, m in masks):
            masks.append((call, mask))
    sources = [c for c in calls if c.index in among and c.name in _HIDDEN and floating(c.out) and c.owns][-_MOST:]
    for call in sources:
        for source, mask in masks[-_MASKS:]:
            if source.index >= call.index or not _fits(mask, call.out):
                continue
            within = f"{source.expression} leaves its operand as it is" if source.name in _LIMITS else source.expression
            for kept, when in ((True, "only where"), (False, "only where not")):
                if bool((torch.where(mask == kept, call.out, 0.0) != call.out).any()):
                    yield _hidden(call, source, kept, f"{call.expression} counts {when} {within}")


def _mask(call: Node, args: tuple, out: object) -> Tensor | None:
    """The result of a comparison, or where a limit is not reached."""
    if not isinstance(out, Tensor):
        return None
    if call.name in _LIMITS and floating(out) and isinstance(args[0], Tensor) and args[0].shape == out.shape:
        return args[0] == out
    return out if out.dtype == torch.bool else None


def _fits(mask: Tensor, out: Tensor) -> bool:
    return mask.shape == out.shape or (
        mask.dim() == out.dim() and all(m in (1, n) for m, n in zip(mask.shape, out.shape, strict=True))
    )


class _CurrentMask:
    """The mask of the current run."""

    mask: Tensor


def _hidden(call: Node, source: Node, kept: bool, text: str) -> Change:
    now = _CurrentMask()

    def seen(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        mask = _mask(source, args, out)
        now.mask = out if mask is None else mask
        return out

    def hidden(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        return torch.where(now.mask == kept, out, torch.zeros_like(out))

    group: tuple[tuple[int, Changed], ...] = ((source.index, seen), (call.index, hidden))
    return Change(
        "wrong_mask", text, call.index, hidden, {"mask": source.expression, "term": call.expression}, 0.35, group=group,
        also=("missing_term", "truncated_reduction"),
    )  # fmt: skip
