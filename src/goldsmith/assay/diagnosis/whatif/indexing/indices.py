"""Indices, masks, comparisons and views: the right numbers from the wrong place, or too many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, instead, with_arguments, with_result

_COMPARES = {"lt": torch.le, "le": torch.lt, "gt": torch.ge, "ge": torch.gt}
_INDEXED = {"index_select": 2, "gather": 2, "embedding": 1, "index_add": 2, "index_add_": 2, "scatter_add": 2,
            "scatter_add_": 2, "index_copy": 2, "scatter": 2}  # fmt: skip
_FORMATS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("without their sign", torch.abs),
    ("shifted by 8", lambda t: t - 8),
    ("shifted by 128", lambda t: t - 128),
    ("as the low four bits", lambda t: t & 15),
    ("as the high four bits", lambda t: (t >> 4) & 15),
)
# results that may be read at another place
_MADE = frozenset("mm bmm sum mul add sub div mean amax sqrt rsqrt logsumexp".split())
_SUMMING = ("index_add", "index_add_", "scatter_add", "scatter_add_")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in ("tril", "triu", "tril_", "triu_"):
        yield from _triangles(call)
    same = call.name in ("detach", "alias", "view", "expand", "unsqueeze", "clone", "lift_fresh")
    if isinstance(call.out, Tensor) and call.out.dtype == torch.bool and call.out.numel() and not same:
        yield from _masks(call)
    if call.name in ("masked_fill", "masked_fill_", "where"):
        yield from _filled(call)
    if call.name in ("t", "transpose", "permute", "flip", "roll"):
        yield from _untransposed(call)
    if call.name in _INDEXED:
        yield from _indices(call, _INDEXED[call.name], call.args[0].shape[_axis(call)])
    if call.name in ("index", "index_put", "index_put_"):
        yield from _index(call)
    if call.name in _SUMMING:
        yield from _lost(call)
    if call.name in ("slice", "select", "narrow"):
        yield from _offsets(call)
    if call.name == "_to_copy" and floating(call.out):
        yield from _reinterpreted(call)
    if floating(call.out) and call.out.numel() > 1 and call.name in _MADE:
        yield from _shifted(call)


def _axis(call: Node) -> int:
    dim = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) and call.name != "embedding" else 0
    return dim % max(call.args[0].dim(), 1)


# masks


def _triangles(call: Node) -> Iterator[Change]:
    diagonal = call.args[1] if len(call.args) > 1 else call.kwargs.get("diagonal", 0)
    which = torch.tril if call.name.startswith("tril") else torch.triu
    for step in (1, -1):
        text = f"the diagonal of {call.name} is {diagonal + step} instead of {diagonal}"
        yield Change("mask_shift", text, call.index, instead(lambda x, *a, s=step, **k: which(x, diagonal + s)),
                     {"diagonal": diagonal + step}, 0.8)  # fmt: skip


def _masks(call: Node) -> Iterator[Change]:
    if call.name in _COMPARES:
        other = _COMPARES[call.name]
        signs = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
        both = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
        text = f"`{signs[both[call.name]]}` stands where the golden has `{signs[call.name]}`"
        change = instead(lambda *a, **k: other(*a))
        causes = ("mask_shift", "off_by_one") if _shifts(call) else ("off_by_one", "mask_shift")
        for cause, prior in zip(causes[: call.out.dim()], (0.75, 0.7), strict=False):
            yield Change(cause, text, call.index, change, {}, prior)
    cause = "invalid_index" if _of_indices(call) else "wrong_mask"
    for value, how in ((True, "always true"), (False, "always false")):
        text = f"the condition {call.expression} is {how}"
        change = with_result(lambda m, v=value: torch.full_like(m, v))
        yield Change(cause, text, call.index, change, {}, 0.6)
        for wrap, where in (("around", "wrap around"), ("clamp", "use the nearest valid one")):
            if cause == "invalid_index":
                text = f"the condition {call.expression} is {how}, and indices out of range {where}"
                yield Change(cause, text, call.index, change, {}, 0.65, wrap=wrap)
    for axis in range(call.out.dim()):
        for step in (1, -1):
            text = f"the mask {call.expression} is shifted by {step} along axis {axis}"
            yield Change("mask_shift", text, call.index, with_result(lambda m, s=step, d=axis: _slid(m, s, d)),
                         {"axis": axis, "step": step}, 0.55)  # fmt: skip


def _of_indices(call: Node) -> bool:
    """Whether indices are compared with a constant, i.e. checked for validity, not for position."""
    tensors = call.tensors
    if len(tensors) != 1 or not whole(tensors[0]):
        return len(tensors) == 2 and all(whole(t) for t in tensors) and min(t.numel() for t in tensors) == 1 and (
            not _shifts(call))  # fmt: skip
    steps = tensors[0].flatten().diff()
    return not len(steps) or not bool((steps == steps[0]).all())


def _shifts(call: Node) -> bool:
    """Whether positions are compared with positions, so that every row's limit moves by one place."""
    numbers = [t.flatten().diff() for t in call.tensors if t.numel() > 1]
    return call.out.dim() > 1 and all(bool((steps == steps[0]).all()) for steps in numbers)


def _slid(t: Tensor, step: int, axis: int) -> Tensor:
    """Shifted, with the border value repeated."""
    n = t.shape[axis]
    at = (torch.arange(n, device=t.device) - step).clamp(0, n - 1)
    return t.index_select(axis, at)


def _filled(call: Node) -> Iterator[Change]:
    at = 0 if call.name == "where" else 1
    mask = call.args[at]
    if not isinstance(mask, Tensor) or not mask.numel():
        return
    for value, how in ((mask.new_zeros(()), "never taken"), (mask.new_ones(()), "always taken")):
        text = f"the mask of {call.expression} is {how}"
        change = with_arguments(lambda args, v=value: replaced(args, at, v.expand_as(args[at])))
        yield Change("wrong_mask", text, call.index, change, {}, 0.55)
    for axis in range(mask.dim()):
        for step in (1, -1):
            change = with_arguments(lambda args, s=step, d=axis: replaced(args, at, _slid(args[at], s, d)))
            text = f"the mask of {call.expression} is shifted by {step} along axis {axis}"
            yield Change("mask_shift", text, call.index, change, {"axis": axis, "step": step}, 0.65)


# indices


def _transformed(n: int, width: int) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor], float]]:
    """(cause, text, changed index, prior) for indices into n places of `width` elements."""
    yield "shifted", "one too high", lambda i: (i + 1) % n, 0.5
    yield "shifted", "one too low", lambda i: (i - 1) % n, 0.5
    yield "shifted", "one too high, at most the last", lambda i: (i + 1).clamp(max=n - 1), 0.45
    yield "wrong_stride", "halved: a stride of half the size", lambda i: i // 2, 0.55
    yield "wrong_stride", "doubled: a stride of twice the size", lambda i: i * 2 % n, 0.55
    yield "invalid_index", "at most the last but one", lambda i: i.clamp(max=n - 2) if n > 1 else i, 0.3
    yield "wrong_stride", _IGNORED, _own_place, 0.4
    yield "permuted", "in reverse order", lambda i: i.flip(-1), 0.4
    yield "permuted", "sorted", lambda i: i.sort(-1).values, 0.4
    yield "permuted", "the order that it undoes", _inverse, 0.5
    for bits, dtype in ((8, torch.int8), (16, torch.int16), (32, torch.int32)):
        if n * width > 2 ** (bits - 1):

            def wrapped(i: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return (i * width).to(dtype).long().remainder(n * width) // width

            yield "index_overflow", f"wrapped at {bits} bits", wrapped, 0.6


_IGNORED = "its own place in order: the index is ignored"


def _of(cause: str, text: str, index: Tensor) -> tuple[str, tuple[str, ...]]:
    """Causes of a changed index: a table that contains no place twice is an order (`permuted`)."""
    if text == _IGNORED and index.numel() > 1 and len(index.unique()) == index.numel():
        return "permuted", ("invalid_index", "wrong_stride")
    return cause, ("invalid_index",) if cause == "wrong_stride" else ()


def _own_place(i: Tensor) -> Tensor:
    return torch.arange(i.numel(), device=i.device).reshape(i.shape).to(i.dtype)


def _inverse(i: Tensor) -> Tensor:
    """The inverse of a permutation; other indices stay as they are and explain nothing."""
    order = i.argsort(-1)
    places = torch.arange(i.shape[-1], device=i.device).expand_as(i)
    return order.to(i.dtype) if torch.equal(i.gather(-1, order).long(), places) else i


def _indices(call: Node, at: int, n: int) -> Iterator[Change]:
    index = call.args[at]
    if not whole(index) or not n:
        return
    source = call.args[0]
    width = source.numel() // n if call.name in ("index_select", "embedding", "index_add") else 1
    name = call.operand(at) or "the index"
    for cause, text, transform, prior in _transformed(n, max(width, 1)):
        change = with_arguments(lambda args, f=transform: replaced(args, at, f(args[at])))
        cause, also = _of(cause, text, index)
        yield Change(
            cause, f"{name} in {call.expression} is {text}", call.index, change, {"index": name}, prior, also=also
        )


def _index(call: Node) -> Iterator[Change]:
    indices = call.args[1]
    for place, index in enumerate(indices):
        if not whole(index):
            continue
        n = call.args[0].shape[place]
        width = 1
        for size in call.args[0].shape[place + 1 :]:
            width *= size
        for cause, text, transform, prior in _transformed(n, width):

            def other(args: tuple, place: int = place, f: Callable[[Tensor], Tensor] = transform) -> tuple:
                new = [f(i) if p == place else i for p, i in enumerate(args[1])]
                return replaced(args, 1, new)

            cause, also = _of(cause, text, index)
            yield Change(
                cause,
                f"an index of {call.expression} is {text}",
                call.index,
                with_arguments(other),
                {},
                prior,
                also=also,
            )
        if call.name == "index" and place == 0 and len([i for i in indices if i is not None]) == 1:
            yield from _flat(call, n, width)
    if call.name.startswith("index_put") and len(call.args) > 3 and call.args[3]:
        text = f"{call.expression} stores where it should add: of several updates of one element one is left"
        yield Change("lost_update", text, call.index, with_arguments(lambda args: replaced(args, 3, False)), {}, 0.7)


def _flat(call: Node, n: int, width: int) -> Iterator[Change]:
    """The flat offset index * width, wrapped to a narrow integer."""
    for bits, dtype in ((8, torch.int8), (16, torch.int16), (32, torch.int32)):
        if n * width <= 2 ** (bits - 1):
            continue

        def read(x: Tensor, indices: Any, dtype: torch.dtype = dtype) -> Tensor:
            i = next(j for j in indices if j is not None)
            start = (i * width).to(dtype).long() % x.numel()
            at = (start[..., None] + torch.arange(width, device=x.device)) % x.numel()
            return x.flatten()[at].reshape(*i.shape, *x.shape[1:])

        text = f"the offsets of {call.expression} wrap at {bits} bits"
        yield Change("index_overflow", text, call.index, instead(read), {"bits": bits}, 0.7)


def _lost(call: Node) -> Iterator[Change]:
    """Stored instead of added: only the last, or the first, of several updates of one element survives."""
    indexed = call.name.startswith("index_add")

    def stored(last: bool, keep: bool) -> Any:
        def make(x: Tensor, dim: int, index: Tensor, source: Tensor, **kwargs: object) -> Tensor:
            order = torch.arange(index.shape[dim if not indexed else 0])
            order = order if last else order.flip(0)
            out = x.clone()
            for i in order.tolist():
                if indexed:
                    row = source.select(dim, i)
                    before = x.select(dim, int(index[i])) if keep else 0
                    out.select(dim, int(index[i])).copy_(row + before)
                else:
                    one, piece = index.narrow(dim, i, 1), source.narrow(dim, i, 1)
                    out.scatter_(dim, one, piece + (x.gather(dim, one) if keep else 0))
            return out

        return instead(make)

    if call.args[2].numel() > 4096:
        return
    yield from _borders(call)
    # consecutive rows of one place are summed in a loop, not scattered
    causes = ("overwritten_accumulator", "lost_update") if indexed and _in_runs(call.args[2]) else ("lost_update",)
    for last, which in ((True, "last"), (False, "first")):
        text = f"{call.expression} stores where it should add: of several updates of one element the {which} is left"
        prior = 0.68 + 0.02 * len(causes)
        yield Change(causes[0], text, call.index, stored(last, True), {"left": which}, prior, also=causes[1:])
    if floating(call.args[0]) and bool(call.args[0].any()):
        text = f"{call.expression} stores over what was there"
        yield Change("overwritten_accumulator", text, call.index, stored(True, False), {}, 0.5)


def _in_runs(index: Tensor) -> bool:
    """Whether the places ascend and repeat, which a few random places seldom do."""
    if index.dim() != 1 or len(index) < 3:
        return False
    return bool((index[1:] >= index[:-1]).all()) and 1 < len(index.unique()) < len(index)


def _borders(call: Node) -> Iterator[Change]:
    """Sums over consecutive groups, each of which begins or ends one too early or too late."""
    index, axis = call.args[2], _axis(call)
    if index.dim() != 1 or len(index) < 3 or bool((index.diff() < 0).any()) or not bool(index.diff().any()):
        return
    first = torch.cat([index.new_ones(1), index.diff()]).nonzero().flatten()
    last = torch.cat([first[1:] - 1, index.new_tensor([len(index) - 1])])
    for text, at, rows, sign in (
        ("begins one too early", first[1:], first[1:] - 1, 1.0), ("ends one too late", last[:-1], last[:-1] + 1, 1.0),
        ("begins one too late", first, first, -1.0), ("ends one too early", last, last, -1.0),
    ):  # fmt: skip

        def borders(x: Tensor, dim: int, index: Tensor, source: Tensor, *args: object, at: Tensor = at,
                    rows: Tensor = rows, sign: float = sign, **kwargs: object) -> Tensor:  # fmt: skip
            out = x.index_add(dim, index, source)
            return out.index_add(dim, index[at], sign * source.index_select(dim, rows))

        if call.name.startswith("index_add"):
            text = f"every group of {call.expression} {text}"
            yield Change("off_by_one", text, call.index, instead(borders), {"axis": axis}, 0.6)


def wraps(t: Tensor) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """(bits, function that wraps integers to them); only where some do not fit"""
    for bits, dtype in ((8, torch.uint8), (8, torch.int8), (16, torch.int16), (32, torch.int32)):
        if bool((t > torch.iinfo(dtype).max).any()):
            yield bits, lambda t, dtype=dtype: t.long().to(dtype).to(t.dtype)  # type: ignore[misc]


# views


def _untransposed(call: Node) -> Iterator[Change]:
    x = call.args[0]
    if not isinstance(x, Tensor) or x.shape != call.out.shape or x.dim() < 2 or torch.equal(x, call.out):
        return
    name = call.operand(0) or "an operand"
    cause, how = {"flip": ("permuted", "reversed"), "roll": ("shifted", "rolled")}.get(call.name, ("transposed",) * 2)
    yield Change(cause, f"{name} is not {how} by {call.name}", call.index,
                 instead(lambda x, *a, **k: x.clone()), {"operand": name}, 0.75)  # fmt: skip


def _offsets(call: Node) -> Iterator[Change]:
    """A part of a tensor taken from another offset along the same axis."""
    x = call.args[0]
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
        return
    axis = (call.args[1] if len(call.args) > 1 else 0) % x.dim()
    start = call.args[2] if len(call.args) > 2 and call.args[2] is not None else 0
    size = 1 if call.name == "select" else call.out.shape[axis]
    n = x.shape[axis]
    if call.name == "select" and x.dim() == 2 and min(x.shape) > 1:
        text = (
            f"{call.expression} is read as if the axes of {call.operand(0) or 'what it reads'} lay in the other order"
        )

        def across(x: Tensor, dim: int, index: int) -> Tensor:
            return x.reshape(x.shape[1], x.shape[0]).select(1 - axis, index)

        params = {"operand": call.operand(0), "axis": axis}
        yield Change("wrong_stride", text, call.index, instead(across), params, 0.5, also=("transposed", "permuted"))
    start = start % n if n else 0
    if size == n or not n:
        return
    for other in dict.fromkeys((0, start - 1, start + 1, start - size, start + size, n - size)):
        if other == start or not 0 <= other <= n - size:
            continue

        def elsewhere(x: Tensor, *args: object, at: int = other, **kwargs: object) -> Tensor:
            part = x.narrow(axis, at, size)
            return part.squeeze(axis) if call.name == "select" else part

        near = abs(other - start) == 1
        cause = "off_by_one" if near and size > 1 else "wrong_stride" if other else "missing_partition"
        text = f"{call.expression} begins at {other} instead of {start} of axis {axis}"
        yield Change(cause, text, call.index, instead(elsewhere), {"axis": axis, "from": other}, 0.45)


def _shifted(call: Node) -> Iterator[Change]:
    for axis in range(call.out.dim()):
        for step in (1, -1) if call.out.shape[axis] > 2 else (1,) if call.out.shape[axis] == 2 else ():
            text = f"the result of {call.expression} is shifted by {step} along axis {axis}"
            params = {"axis": axis, "step": step}
            yield Change("shifted", text, call.index, with_result(lambda t, s=step, d=axis: t.roll(s, d)), params, 0.3)


def _reinterpreted(call: Node) -> Iterator[Change]:
    """Converted integers whose bits are read as another format."""
    x = call.args[0]
    if not whole(x):
        return
    other = {torch.int8: torch.uint8, torch.uint8: torch.int8}.get(x.dtype)
    name = call.operand(0) or "the stored numbers"
    if other is not None:

        def bytes_as(args: tuple) -> tuple:
            return replaced(args, 0, args[0].view(other))

        text = f"the bytes of {name} are read as {str(other).removeprefix('torch.')}"
        yield Change("wrong_format", text, call.index, with_arguments(bytes_as), {"input": name}, 0.7)
    for text, read in _FORMATS:
        change = instead(lambda t, *a, read=read, **k: read(t.long()).to(k.get("dtype", torch.float64)))
        yield Change("wrong_format", f"{name} is read {text}", call.index, change, {"input": name}, 0.4)
