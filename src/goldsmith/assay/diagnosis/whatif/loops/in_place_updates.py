"""An operator reads a tensor after its update in place, where the golden reads the value before.

Two examples: the second number of a rotated pair is computed from the first one, which is already rotated. The second
of two moments in one buffer is computed from the first one, which is already updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...graph.node import Key, Node
from ...graph.tensors import floating, replaced
from ..change import Change

_READ = frozenset("mul div add sub addcmul lerp mm bmm addmm where pow square exp".split())
_MOST, _OTHERS = 200, 6


class _CurrentValue:
    """Holds the value that an operator computes in the current run."""

    value: Tensor


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    readers: dict[Key, list[Node]] = {}
    for call in calls:
        if not call.backward:
            for key in call.makers:
                readers.setdefault(key, []).append(call)
    count = 0
    for call in calls:
        if call.backward or call.index not in among or call.name not in _READ:
            continue
        places = [i for i, a in enumerate(call.args) if isinstance(a, Tensor)]
        for i, key in zip(places, call.makers, strict=False):
            for other in _updates(readers, key, call, call.args[i]):
                count += 1
                if count <= _MOST:
                    yield _reads(call, i, other)


def _updates(readers: dict[Key, list[Node]], key: Key, call: Node, own: Tensor) -> list[Node]:
    """Results with the operand's shape that are computed from it, before the call and in at most two steps."""
    near = [c for c in readers.get(key, []) if c.index < call.index]
    far = [c for n in near for c in readers.get(n.index, []) if c.index < call.index]
    updates = {c.index: c for c in (*far, *near)}
    return [
        c for c in updates.values()
        if floating(own) and floating(c.out) and c.out.shape == own.shape and c.owns and c.index not in call.makers
    ][:_OTHERS]  # fmt: skip


def _reads(call: Node, at: int, other: Node) -> Change:
    now = _CurrentValue()

    def seen(func: Any, args: tuple, kwargs: dict) -> Any:
        now.value = func(*args, **kwargs)
        return now.value

    def after(func: Any, args: tuple, kwargs: dict) -> Any:
        return func(*replaced(args, at, now.value), **kwargs)

    mine = call.operand(at) or "an operand"
    text = f"{call.expression} reads {other.expression} in place of {mine}: {mine} is updated before it is read"
    params = {"operand": mine, "exchanged": [mine, other.expression]}
    return Change("wrong_saved_tensor", text, call.index, after, params, 0.32,
                  group=((other.index, seen), (call.index, after)), also=("aliased", "stale_state"))  # fmt: skip
