"""A single reader of a product, or of a sum of products, without one factor; all other readers are right.

A hand-written backward computes a product once and uses it in several addends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..edits.golden_edit import NamedEdit, do, named
from ..graph.node import Key, Node, maker_of
from ..graph.tensors import floating, replaced, seen_through

_PRODUCTS, _SUMS = ("mul", "div"), ("add", "sub")
_ALIASES = frozenset("detach alias clone".split())
_MOST = 16  # readers of one tensor
_DEPTH = 3  # nested products
Place = tuple[Node, int]


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[NamedEdit]:
    readers: dict[Key, list[Place]] = {}
    for call in calls:
        if call.index not in among or not call.owns or call.name in _ALIASES:
            continue
        keys = iter(call.makers)
        for i, a in enumerate(call.args):
            if isinstance(a, Tensor):
                key = next(keys)
                if floating(a) and a.numel() > 1 and key != -1:
                    readers.setdefault(key, []).append((call, i))
    for source in calls:
        if source.name in (*_PRODUCTS, *_SUMS) and source.owns and floating(source.out) and source.out.numel() > 1:
            own = readers.get(source.index, [])[:_MOST]
            yield from _of_one_reader(calls, source, own if len(own) > 1 else [])


def _of_one_reader(calls: Sequence[Node], source: Node, own: list[Place]) -> Iterator[NamedEdit]:
    """A factor is left out for one of several readers."""
    if not own:
        return
    for name, value in _without(calls, source, _DEPTH):
        for reader, at in own:
            text = f"{name} is left out of {source.expression} where {reader.expression} reads it"
            read = at, do(see, new=_laid(value, source.out))
            yield named(reader, "wrong_factor", 0.65, text, read, factor=name, named=f"1/{name}")
    for i, (name, value) in _within_addends(calls, source):
        for reader, at in own:
            text = f"{name} is left out of addend {i + 1} of {source.expression} where {reader.expression} reads it"
            read = at, do(see, new=_laid(value, source.out))
            yield named(reader, "wrong_factor", 0.6, text, read, factor=name, named=f"1/{name}")


def _without(calls: Sequence[Node], source: Node, depth: int) -> Iterator[tuple[str, Tensor]]:
    """(a factor, the product of the others), for nested products as well."""
    if source.name not in _PRODUCTS or not depth or len(source.args) < 2:
        return
    a, b = source.args[0], source.args[1]
    if floating(a) and floating(b):
        yield source.operand(1) or f"an operand of {source.name}", a.expand(source.out.shape)
        if source.name == "mul":
            yield source.operand(0) or f"an operand of {source.name}", b.expand(source.out.shape)
    keys = iter(source.makers)
    for i, operand in enumerate((a, b)):
        key = next(keys) if isinstance(operand, Tensor) else -1
        maker = maker_of(calls, key)
        if not floating(operand) or maker is None:
            continue
        for name, value in _without(calls, maker, depth - 1):
            seen = seen_through(_laid(value, maker.out), operand)
            if seen is not None and source.func is not None:
                yield name, source.func(*replaced(source.args, i, seen), **source.kwargs)


def _within_addends(calls: Sequence[Node], source: Node) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    """A factor of one of two addends, and the sum without that factor."""
    if source.name not in _SUMS or len(source.makers) != 2 or source.func is None:
        return
    for i, key in enumerate(source.makers):
        maker = maker_of(calls, key)
        for name, value in _without(calls, maker, _DEPTH - 1) if maker is not None and maker.owns else ():
            seen = seen_through(_laid(value, maker.out), source.args[i]) if maker is not None else None
            if seen is not None:
                yield i, (name, source.func(*replaced(source.args, i, seen), **source.kwargs))


def _laid(value: Tensor, like: Tensor) -> Tensor:
    """Copied to the memory layout of `like`."""
    return torch.empty_like(like).copy_(value)


def see(x: Tensor, *, new: Tensor) -> Tensor:
    """Another tensor, read through the view x."""
    seen = seen_through(new, x)
    if seen is None:
        raise RuntimeError("read through a view of another size")
    return seen
