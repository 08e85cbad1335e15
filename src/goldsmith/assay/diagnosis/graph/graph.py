"""Graph: the operators of one run of the golden, who made and who reads each tensor, and what the backward reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .node import Key, Node, maker_of
from .tensors import floating, seen_through


@dataclass(frozen=True)
class Graph:
    """nodes: all operators, in order; behind: indices of those that the wrong tensor depends on."""

    nodes: Sequence[Node]
    behind: set[int]

    def maker(self, key: Key) -> Node | None:
        return maker_of(self.nodes, key)

    def operands(self) -> Iterator[tuple[Node, int, Key, Tensor]]:
        """All reads of floating-point tensors with several elements."""
        for node in self.nodes:
            keys = iter(node.makers)
            for i, a in enumerate(node.args):
                key = next(keys) if isinstance(a, Tensor) else -1
                if floating(a) and a.numel() > 1 and key != -1:
                    yield node, i, key, a

    @cached_property
    def named(self) -> dict[str, Key]:
        """The keys of inputs and of named results that an operator of the forward reads whole."""
        names: dict[str, Key] = {}
        for node, i, key, a in self.operands():
            maker = self.maker(key)
            if not node.backward and (
                maker.out.shape == a.shape if maker is not None and maker.owns else key == node.operand(i)
            ):
                names.setdefault(node.operand(i), key)
        return names

    @cached_property
    def read_back(self) -> set[Key]:
        """Keys of the tensors that the backward operators behind the wrong tensor read."""
        return {key for n in self.nodes if n.backward and n.index in self.behind for key in n.makers}


def followed(
    nodes: Sequence[Node], new: Mapping[Key | tuple[int, int], Tensor], through: frozenset[str] | None,
    otherwise: Callable[[Node, Sequence], Tensor | None] | None = None,
) -> dict[Key, Tensor]:  # fmt: skip
    """The tensors of `new`, and the forward results recomputed from them by these operators; None: by any.

    new        by key, or by (operator, position) for what one operator alone reads
    otherwise  an operator's changed result for the new arguments; None if it is unchanged
    """
    tensors = {key: t.contiguous() for key, t in new.items() if not isinstance(key, tuple)}
    alone = {key: t.contiguous() for key, t in new.items() if isinstance(key, tuple)}
    reading = {index for index, _ in alone}
    for node in nodes:
        reached = node.index in reading or any(key in tensors for key in node.makers)
        if node.backward or not reached or node.index in tensors:
            continue
        own = isinstance(node.out, Tensor) and node.func is not None and node.owns
        if not own or (through is not None and node.name not in through):
            continue
        keys = iter(node.makers)
        args = []
        for i, a in enumerate(node.args):
            result = tensors.get(next(keys)) if isinstance(a, Tensor) else None
            result = alone.get((node.index, i), result)
            args.append(a if result is None else seen_through(result, a))
        if all(a is not None for a, b in zip(args, node.args, strict=True) if b is not None):
            other = None if otherwise is None else otherwise(node, args)
            tensors[node.index] = (node.func(*args, **node.kwargs) if other is None else other).contiguous()
    return tensors
