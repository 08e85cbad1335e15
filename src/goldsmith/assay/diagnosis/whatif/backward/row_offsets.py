"""A value computed for one place and read at another: a neighbour's, or the first one's.

A backward with a wrong offset reads another row's logsumexp, another head's scale or another block's state. The same
happens in a forward that computes a number per block and reads the first one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...graph.node import Instead, Key, Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments, with_result
from .saved_tensors import followed

_MOST = 12  # tensors that the backward reads
_LEAST = 2
_READERS = 4  # readers of one tensor that are tried one by one
_ALIASES = frozenset("detach alias".split())
_FOLLOWED = frozenset("index_select index gather clone _to_copy contiguous masked_fill embedding".split())
_MADE = frozenset("amax amin sum mean logsumexp rsqrt sqrt reciprocal div linalg_vector_norm".split())
_SMALL = 1 << 14
Moved = tuple[str, str, Callable[[Tensor], Tensor], tuple[str, ...], float]


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """All backward readers of a tensor change, or one of them."""
    forward: dict[Key, str] = {}
    readers: dict[Key, list[tuple[Node, int]]] = {}
    for call in calls:
        keys = iter(call.makers)
        for i, a in enumerate(call.args):
            key = next(keys) if isinstance(a, Tensor) else -1
            if not floating(a) or a.numel() < _LEAST or key == -1 or str(key).startswith("grad_"):
                continue
            if not call.backward:
                forward[key] = call.operand(i)
            elif key in forward and call.index in among and call.name not in _ALIASES:
                readers.setdefault(key, []).append((call, i))
    for key, places in list(readers.items())[:_MOST]:
        name, first = forward[key] or "a saved tensor", places[0][0].args[places[0][1]]
        for axis, n in enumerate(first.shape if first.is_contiguous() else ()):
            for cause, how, move, also, rarer in _moves(axis, n):
                params = {"saved": name, "axis": axis}
                also = (*also, "wrong_saved_tensor")
                text = f"the backward reads {name} {how}"
                yield Change(cause, text, -1, None, params, 0.46 - rarer,
                             saved=_instead(list(calls), key, move), also=also)  # fmt: skip
                for call, i in places if 1 < len(places) <= _READERS else ():
                    change = with_arguments(lambda args, i=i, move=move: replaced(args, i, move(args[i])))
                    text = f"{call.expression} in the backward reads {name} {how}"
                    if call.args[i].shape == first.shape:
                        yield Change(cause, text, call.index, change, params, 0.42 - rarer, also=also)


def _moves(axis: int, n: int) -> Iterator[Moved]:
    """(cause, description, replacement, other causes, how much rarer)"""
    for step in (1, -1) if n > 2 else ():
        where = f"of the {'previous' if step > 0 else 'next'} position along axis {axis}"
        yield "shifted", f"{where}, its own at the end", partial(_slid, step=step, axis=axis), ("off_by_one",), 0.0
        yield "shifted", f"{where}, wrapping around", partial(torch.roll, shifts=step, dims=axis), ("off_by_one",), 0.01
    if n > 1:
        text = f"of the first position along axis {axis} for all"
        yield "wrong_stride", text, partial(_first, axis=axis), ("invalid_index", "wrong_factor"), 0.0


def _slid(t: Tensor, step: int, axis: int) -> Tensor:
    n = t.shape[axis]
    return t.index_select(axis, (torch.arange(n, device=t.device) - step).clamp(0, n - 1))


def _first(t: Tensor, axis: int) -> Tensor:
    return t.narrow(axis, 0, 1).expand(t.shape).contiguous()


def _instead(calls: list[Node], key: Key, move: Callable[[Tensor], Tensor]) -> Instead:
    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        return followed(calls, {key: move(tensors[key])}, _FOLLOWED) if key in tensors else {}

    return instead


def of_a_call(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    """In the forward: one of several numbers, such as a block's scale, in place of all."""
    small = floating(call.out) and _LEAST <= call.out.numel() <= _SMALL
    if call.backward or call.name not in _MADE or not small:
        return
    for axis, n in enumerate(call.out.shape):
        if n > 1:
            text = f"the first entry along axis {axis} of {call.expression} is used for all"
            yield Change("wrong_stride", text, call.index, with_result(lambda t, d=axis: _first(t, d)), {"axis": axis},
                         0.36, also=("invalid_index", "wrong_factor"))  # fmt: skip
