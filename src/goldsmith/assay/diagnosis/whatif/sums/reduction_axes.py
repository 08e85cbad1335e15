"""Sums and means over other axes than the golden's: of the shape before a view, over one more, or over fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Any

from torch import Tensor

from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating
from ..change import Change, with_result

_MOST = 5  # axes
_SHAPES = 3
_ROWS = 3  # row factors to try
_DEPTH = 3  # operators before a sum


def changes(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """Each changed result keeps the golden's shape; it is spread over the reduced axes where they differ."""
    axes = call.args[1] if len(call.args) > 1 else None
    if call.name not in ("sum", "mean") or not isinstance(axes, list | tuple) or not floating(call.args[0]):
        return
    x = call.args[0]
    own = tuple(sorted(a % x.dim() for a in axes)) if x.dim() else ()
    keep = len(call.args) > 2 and bool(call.args[2])
    count = prod(x.shape[a] for a in own)
    row = _row_factor(call, calls, own)
    offered: set[tuple] = set()
    for shape in _shapes(call, calls):
        for over in _over(len(shape)):
            seen = shape == tuple(x.shape)
            wide = prod(shape[a] for a in over)
            # `reductions` covers another single axis of the same shape, and all axes
            if seen and (over == own or not set(over) > set(own) and not set(over) < set(own)) or wide < 2:
                continue
            key = (shape, over)
            if key in offered:
                continue
            offered.add(key)
            where = ", ".join(map(str, over))
            text = f"{call.expression} runs along axes {where} of {list(shape)} instead of {', '.join(map(str, own))}"
            params = {"input": call.operand(0), "axis": over[0], "golden_axis": own[0] if own else 0}
            for share in (1.0, count / wide) if call.name == "sum" and count != wide else (1.0,):
                by = "" if share == 1.0 else ", and is divided by their lengths"
                change = _along(shape, over, own, keep, share, row if seen else None)
                yield Change("wrong_axis", text + by, call.index, change, params, 0.6 - 0.01 * (share != 1.0))


def _over(dims: int) -> list[tuple[int, ...]]:
    if not dims or dims > _MOST:
        return []
    return [over for size in range(1, dims + 1) for over in combinations(range(dims), size)]


def _shapes(call: Node, calls: Sequence[Node]) -> list[tuple[int, ...]]:
    """The operand's own shape, then shapes of the tensors it comes from with as many elements."""
    x = call.args[0]
    shapes = {tuple(x.shape): None}
    waiting = [call]
    for _ in range(_DEPTH):
        makers = [calls[k] for c in waiting for k in c.makers if isinstance(k, int) and 0 <= k < len(calls)]
        for t in (t for c in (*waiting, *makers) for t in c.tensors):
            if t.numel() == x.numel() and x.is_contiguous() and t.dim() > 1:
                shapes.setdefault(tuple(t.shape))
        waiting = makers
    return list(shapes)[:_SHAPES]


def _row_factor(call: Node, calls: Sequence[Node], own: tuple[int, ...]) -> Tensor | None:
    """A factor of the summed tensor that is one number per sum: kernels multiply by it after summing."""
    maker = call
    for _ in range(_DEPTH):
        key = maker.makers[0] if maker.makers else -1
        if not isinstance(key, int) or not 0 <= key < len(calls):
            return None
        maker = calls[key]
        if maker.name == "neg":
            continue
        for t in maker.tensors if maker.name == "mul" else ():
            row = t.dim() == call.args[0].dim() and all(t.shape[a] == 1 for a in own) and t.numel() > 1
            if row and floating(t) and not bool((t == 0).any()):
                return t
        return None
    return None


def backward_sums(calls: Sequence[Node], among: set[int]) -> Iterator[tuple[Node, Tensor, tuple[int, ...]]]:
    """(sum of a backward, its addends, its axes), if no result is 0."""
    for call in calls:
        if not (call.backward and call.index in among and call.name == "sum" and floating(call.out)):
            continue
        axes = call.args[1] if len(call.args) > 1 else None
        x = call.args[0]
        if isinstance(axes, list | tuple) and x.dim() and not bool((call.out == 0).any()):
            yield call, x, tuple(sorted(a % x.dim() for a in axes))


def in_addends(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """Backward sums over fewer places than the golden's, each spread over those places, as a factor of an addend.

    The sum itself cannot be changed, since autograd would reduce a result that is larger than expected.
    """
    groups: dict[tuple, list[tuple[int, Changed]]] = {}
    for call, x, own in backward_sums(calls, among):
        if not x.is_contiguous():
            continue
        addend = addend_of(calls, call, among)
        rows = _rows(calls, x, own)
        golden = x.sum(own, keepdim=True)
        if addend is None:
            continue
        for shape in _shapes(call, calls):
            for over in _over(len(shape)):
                wide = prod(shape[a] for a in over)
                if shape == tuple(x.shape) and over == own or wide < 2:
                    continue
                wider = shape == tuple(x.shape) and set(over) > set(own)
                for row in (None, *rows) if wider else (None,):
                    bare = x if row is None else x * row
                    part = bare.reshape(shape).sum(over, keepdim=True).expand(shape).reshape(x.shape) / golden
                    part = part if row is None else part / row
                    for share in {1.0, prod(x.shape[a] for a in own) / wide}:
                        factor = (part * share).reshape(addend.out.shape)
                        change = with_result(lambda out, f=factor: out * f)
                        if row is None:
                            groups.setdefault((shape, over, share == 1.0), []).append((addend.index, change))
                        by = "" if share == 1.0 else ", and is divided by their lengths"
                        where = ", ".join(map(str, over))
                        text = f"{call.expression} runs along axes {where} of {list(shape)} instead of {list(own)}{by}"
                        prior = 0.57 - 0.01 * bool(by)
                        yield Change("wrong_axis", text, addend.index, change, {"axis": over[0]}, prior)
    for (shape, over, plain), group in groups.items():
        if len({at for at, _ in group}) == len(group) > 1:
            by = "" if plain else ", and are divided by their lengths"
            text = f"{len(group)} sums run along axes {', '.join(map(str, over))} of {list(shape)}{by}"
            yield Change("wrong_axis", text, group[0][0], group[0][1], {"axis": over[0]}, 0.55, group=tuple(group))


def _rows(calls: Sequence[Node], x: Tensor, own: tuple[int, ...]) -> list[Tensor]:
    """Forward tensors with one number for each sum, by which a kernel may multiply before it sums."""
    shape = tuple(1 if d in own else n for d, n in enumerate(x.shape))
    rows = [c.out for c in calls if not c.backward and c.owns and floating(c.out) and tuple(c.out.shape) == shape]
    return [t for t in rows if t.numel() > 1 and not bool((t == 0).any())][-_ROWS:]


def addend_of(calls: Sequence[Node], call: Node, among: set[int]) -> Node | None:
    """The first addend of the summed tensor's size that has the sum as a factor."""
    reached: set[Key] = {call.index}
    size = call.args[0].numel()
    for other in calls[call.index + 1 :]:
        if other.index not in among or not reached.intersection(other.read):
            continue
        if other.name in ("add", "sub"):
            for key, t in zip(other.makers, other.tensors, strict=True):
                whole = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
                if key in reached and t.numel() == size and whole is not None and whole.owns:
                    return whole if whole.out.numel() == size and whole.out.is_contiguous() else None
        reached.add(other.index)
    return None


def _along(
    shape: tuple[int, ...], over: tuple[int, ...], own: tuple[int, ...], keep: bool, share: float, row: Tensor | None
) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Tensor:
        x = args[0]
        bare = x if row is None else x / row
        part = func(bare.reshape(shape), list(over), True, **kwargs) * share
        spread = part.expand(shape).reshape(x.shape) * (1.0 if row is None else row)
        first = spread
        for axis in own:
            first = first.narrow(axis, 0, 1)
        if bool((first == spread).all()):
            return first.contiguous() if keep else first.reshape([n for d, n in enumerate(x.shape) if d not in own])
        raise RuntimeError("of another shape than the golden's")

    return run
