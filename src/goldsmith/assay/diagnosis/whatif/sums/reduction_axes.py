"""Sums of a backward over other axes than the golden's: of the shape before a view, over one more, or over fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from ...edits.reductions import axis_sets, shapes_before
from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating
from ..change import Change, with_result

_MOST = 5  # axes
_SHAPES = 3
_ROWS = 3  # row factors to try
_DEPTH = 3  # operators before a sum


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
        for shape in shapes_before(call, calls):
            for over in axis_sets(len(shape)):
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
