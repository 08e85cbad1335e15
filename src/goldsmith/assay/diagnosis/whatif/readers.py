"""One reader of a tensor reads an operand of it, or what is made of it: right everywhere else.

A backward that is written by hand forms a product once and uses it in several addends; in one of them it takes a factor
of the product instead, or the product where its factor belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .calls import Call, Change, Changed, Key, floating, given, replaced, seen_through

_PRODUCTS, _SUMS = ("mul", "div"), ("add", "sub")
_ALIASES = frozenset("detach alias clone".split())
_MOST = 16  # readers of one tensor
Place = tuple[Call, int]


def changes(calls: Sequence[Call], among: set[int]) -> Iterator[Change]:
    """`among`: the operators that the wrong tensor is made of."""
    readers: dict[Key, list[Place]] = {}
    for call in calls:
        if call.index not in among or not call.owns or call.name in _ALIASES:
            continue
        keys = iter(call.made)
        for i, a in enumerate(call.args):
            if isinstance(a, Tensor):
                key = next(keys)
                if floating(a) and a.numel() > 1 and key != -1:
                    readers.setdefault(key, []).append((call, i))
    for made in calls:
        if made.name in (*_PRODUCTS, *_SUMS) and made.owns and floating(made.out) and made.out.numel() > 1:
            yield from _of(made, readers)


def _of(made: Call, readers: dict[Key, list[Place]]) -> Iterator[Change]:
    own = readers.get(made.index, [])[:_MOST]
    for i, key in enumerate(made.made[:2]):
        operand, other = made.args[i], made.operand(1 - i) or f"an operand of {made.name}"
        if not floating(operand) or len(made.made) != 2 or (made.name == "div" and i):
            continue
        value = -operand if made.name == "sub" and i else operand
        for reader, at in own if len(own) > 1 else ():
            cause = "wrong_factor" if made.name in _PRODUCTS else "missing_term"
            text = f"{other} is left out of {made.said} where {reader.said} reads it"
            yield _change(cause, text, reader, at, value.expand_as(made.out), made.out, other, 0.65)
        for reader, at in readers.get(key, [])[:_MOST]:
            if reader.index in (made.index,) or operand.shape != made.out.shape:
                continue
            cause = "wrong_factor" if made.name in _PRODUCTS else "repeated_term"
            text = f"{reader.said} reads {made.said} in place of {made.operand(i) or 'its operand'}"
            yield _change(cause, text, reader, at, made.out, operand, other, 0.55)


def _change(
    cause: str, text: str, reader: Call, at: int, value: Tensor, like: Tensor, named: str, prior: float
) -> Change:
    new = torch.empty_like(like).copy_(value)  # laid out as what is read
    params = {"factor" if cause == "wrong_factor" else "term": named, "named": f"1/{named}"}
    return Change(cause, text, reader.index, _read(at, new), params, prior)


def _read(at: int, new: Tensor) -> Changed:
    def other(args: tuple) -> tuple:
        seen = seen_through(new, args[at])
        if seen is None:
            raise RuntimeError("read through a view of another size")
        return replaced(args, at, seen)

    return given(other)
