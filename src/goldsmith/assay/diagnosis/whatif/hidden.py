"""A mask that the golden knows hides one number more: an addend counts only where another one should.

Codes at their limit have no part in the gradient of a scale, ignored tokens none in a regulariser.
The mask is taken from the very run that is changed, so that other draws can be asked as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .calls import Call, Change, Changed, floating

_MASKS, _MOST = 6, 48
_HIDDEN = frozenset("mul div add sub neg exp log pow square sqrt rsqrt sigmoid tanh rsub".split())


def changes(calls: Sequence[Call], among: set[int]) -> Iterator[Change]:
    """`among`: the operators that the wrong tensor is made of."""
    masks: list[Call] = []
    for call in calls:
        out = call.out
        new = isinstance(out, Tensor) and out.dtype == torch.bool and bool(out.any()) and not bool(out.all())
        if new and not any(m.out.shape == out.shape and torch.equal(m.out, out) for m in masks):
            masks.append(call)
    made = [c for c in calls if c.index in among and c.name in _HIDDEN and floating(c.out) and c.owns][-_MOST:]
    for call in made:
        for mask in masks[-_MASKS:]:
            if mask.index >= call.index or not _fits(mask.out, call.out):
                continue
            for kept, said in ((True, "only where"), (False, "only where not")):
                if bool((torch.where(mask.out == kept, call.out, 0.0) != call.out).any()):
                    yield _hidden(call, mask, kept, f"{call.said} counts {said} {mask.said}")


def _fits(mask: Tensor, out: Tensor) -> bool:
    return mask.shape == out.shape or (
        mask.dim() == out.dim() and all(m in (1, n) for m, n in zip(mask.shape, out.shape, strict=True))
    )


class _Now:
    """The mask of the run that is going on."""

    mask: Tensor


def _hidden(call: Call, mask: Call, kept: bool, text: str) -> Change:
    now = _Now()

    def seen(func: Any, args: tuple, kwargs: dict) -> Any:
        now.mask = func(*args, **kwargs)
        return now.mask

    def hidden(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        return torch.where(now.mask == kept, out, torch.zeros_like(out))

    group: tuple[tuple[int, Changed], ...] = ((mask.index, seen), (call.index, hidden))
    return Change(
        "wrong_mask", text, call.index, hidden, {"mask": mask.said, "term": call.said}, 0.35, group=group,
        also=("missing_term", "truncated_reduction"),
    )  # fmt: skip
