"""The primitives that read other positions: shifts, orders, strides; and those that make other indices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..golden_edit import OperatorCall


def shift(x: Tensor, *, axis: int, step: int, edge: str) -> Tensor:
    """Moved by `step`; edge: "around" wraps, "own" repeats the border, "zero" fills with zeros."""
    if edge == "own":
        n = x.shape[axis]
        return x.index_select(axis, (torch.arange(n, device=x.device) - step).clamp(0, n - 1))
    moved = x.roll(step, axis)
    if edge == "zero":
        moved.select(axis, 0 if step > 0 else -1).zero_()
    return moved


def exchange(x: Tensor, *, i: int, j: int) -> Tensor:
    return x.transpose(i, j).contiguous()


def reverse(x: Tensor, *, axis: int) -> Tensor:
    return x.flip(axis)


# position i of n is read at:
RULES = {
    "halved": lambda i, n, b: i // 2,
    "doubled": lambda i, n, b: i * 2 % n,
    "second half": lambda i, n, b: torch.where((i >= n // 2) & (i < 2 * (n // 2)), i - n // 2, i),
    "within block": lambda i, n, b: i % b,
    "block": lambda i, n, b: i // b,
    "first": lambda i, n, b: i * 0,
    "last": lambda i, n, b: i * 0 + (n - 1),
}


def reindex(x: Tensor, *, axis: int, rule: str, block: int = 0) -> Tensor:
    n = x.shape[axis]
    return x.index_select(axis, RULES[rule](torch.arange(n, device=x.device), n, block))


def repeat_block(x: Tensor, *, axes: tuple[int, ...], block: int) -> Tensor:
    """The first block of an axis in the place of every block."""
    for axis in axes:
        x = reindex(x, axis=axis, rule="within block", block=block)
    return x


def by_order_of(x: Tensor, by: Tensor, *, axes: int, undone: bool) -> Tensor:
    """Rows in the order that sorts an index, or in the inverse order."""
    order = by.flatten().argsort(stable=True)
    return x.flatten(0, axes - 1)[order.argsort() if undone else order].reshape(x.shape)


def within_segments(x: Tensor, offsets: Tensor) -> Tensor:
    """Rows counted from the beginning in every segment."""
    place = torch.arange(int(offsets[-1]), device=offsets.device)
    place = place - offsets[torch.searchsorted(offsets, place, right=True) - 1]
    return x.index_select(0, place.to(x.device))


def half_stride(x: Tensor) -> Tensor:
    """The entries of a stack start at half of their distance."""
    dense = x.contiguous()
    return dense.as_strided(x.shape, (dense.stride(0) // 2, *dense.stride()[1:])).clone()


# squares


def fill_diagonal(x: Tensor, *, offset: int, value: float) -> Tensor:
    one = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    return x.masked_fill(one.triu(offset) & one.tril(offset), value)


# integers


def replace_index(i: Tensor, *, rule: str, n: int, width: int = 1) -> Tensor:
    """Another index into n places of `width` elements."""
    if rule.startswith("wrapped"):
        dtype = {8: torch.int8, 16: torch.int16, 32: torch.int32}[int(rule.split()[1])]
        return (i * width).to(dtype).long().remainder(n * width) // width
    return INDEX_RULES[rule](i, n)


def _inverse(i: Tensor, n: int) -> Tensor:
    """The inverse of a permutation; other indices stay as they are and explain nothing."""
    order = i.argsort(-1)
    places = torch.arange(i.shape[-1], device=i.device).expand_as(i)
    return order.to(i.dtype) if torch.equal(i.gather(-1, order).long(), places) else i


def _own_place(i: Tensor, n: int) -> Tensor:
    return torch.arange(i.numel(), device=i.device).reshape(i.shape).to(i.dtype)


INDEX_RULES = {
    "one too high": lambda i, n: (i + 1) % n,
    "one too low": lambda i, n: (i - 1) % n,
    "one too high, at most the last": lambda i, n: (i + 1).clamp(max=n - 1),
    "halved": lambda i, n: i // 2,
    "doubled": lambda i, n: i * 2 % n,
    "at most the last but one": lambda i, n: i.clamp(max=n - 2) if n > 1 else i,
    "its own place": _own_place,
    "in reverse order": lambda i, n: i.flip(-1),
    "sorted": lambda i, n: i.sort(-1).values,
    "the order that it undoes": _inverse,
}


def other_rows(i: Tensor, *, old: int, new: int) -> Tensor:
    """Places of a table with rows of `new` elements, in place of `old`."""
    return i // old * new + i % old


def shift_owners(i: Tensor, *, rule: str, groups: int) -> Tensor:
    """The first entry of each group counts for the group before, or the last one for the group after."""
    if rule == "after":
        return torch.cat((i[1:], i[-1:]))
    first = i.new_tensor([groups - 1]) if rule == "before, wrapping around" else i[:1]
    return torch.cat((first, i[:-1]))


def replace_integers(t: Tensor, *, rule: str, c: int = 0) -> Tensor:
    """Other numbers in an integer input."""
    return INTEGER_RULES[rule](t, c)


INTEGER_RULES = {
    "plus": lambda t, c: t + c,
    "plus, within its range": lambda t, c: (t.long() + c).clamp(int(t.min()), int(t.max())).to(t.dtype),
    "plus, wrapping around": lambda t, c: (
        int(t.min()) + (t.long() + c - int(t.min())) % (int(t.max()) - int(t.min()) + 1)
    ).to(t.dtype),
    "halved": lambda t, c: t // 2,
    "at least one": lambda t, c: t.clamp(min=1),
    "none is all": lambda t, c: torch.where(t == 0, t.amax(), t),
    "whole blocks": lambda t, c: -(-t // c) * c,
    "the largest for all": lambda t, c: t.amax().expand(t.shape).clone(),
    "all": lambda t, c: torch.full_like(t, c),
    # bytes of two four-bit numbers
    "halves exchanged": lambda t, c: t % 16 * 16 + t // 16,
    "low halves": lambda t, c: t % 16 * 17,
    "high halves": lambda t, c: t // 16 * 17,
    # formats
    "without their sign": lambda t, c: t.abs(),
    "shifted by 8": lambda t, c: t - 8,
    "shifted by 128": lambda t, c: t - 128,
    "as the low four bits": lambda t, c: t & 15,
    "as the high four bits": lambda t, c: (t >> 4) & 15,
    # of c bits
    "without a sign": lambda t, c: t.long() % (1 << c),
    "with a sign": lambda t, c: t.long() - (1 << c) * (t.long() >= 1 << c - 1),
    "sign and magnitude": lambda t, c: (t.long() % (1 << c - 1)) * (1 - 2 * (t.long() >= 1 << c - 1).long()),
}


def wrap(t: Tensor, *, bits: int, low: int) -> Tensor:
    """Integers cut to a width, of which `low` is the least number."""
    return (t - low) % (1 << bits) + low


def cast_through(t: Tensor, *, dtype: torch.dtype) -> Tensor:
    return (t if t.is_floating_point() else t.long()).to(dtype).to(t.dtype)


def view_bytes(t: Tensor, *, dtype: torch.dtype) -> Tensor:
    return t.view(dtype)


def convert(call: OperatorCall, *, rule: str) -> Tensor:
    """A conversion of integers that reads them in another format."""
    return replace_integers(call.x.long(), rule=rule).to(call.kwargs.get("dtype", torch.float64))


def wraps(t: Tensor) -> Iterator[tuple[int, torch.dtype]]:
    """Widths in which some of the integers do not fit."""
    for bits, dtype in ((8, torch.uint8), (8, torch.int8), (16, torch.int16), (32, torch.int32)):
        if bool((t > torch.iinfo(dtype).max).any()):
            yield bits, dtype


# views


def narrow(call: OperatorCall, *, axis: int, start: int, size: int, squeeze: bool) -> Tensor:
    part = call.x.narrow(axis, start, size)
    return part.squeeze(axis) if squeeze else part


def select_across(call: OperatorCall, *, axis: int) -> Tensor:
    """A row of a matrix, read as if its axes lay in the other order."""
    return call.x.reshape(call.x.shape[1], call.x.shape[0]).select(1 - axis, call.args[2])


def select_neighbour(call: OperatorCall, *, step: int) -> Tensor:
    x, axis, index = call.args[:3]
    return x.select(axis, min(max(index % x.shape[axis] + step, 0), x.shape[axis] - 1))


def repeat_in_turn(call: OperatorCall, *, axis: int) -> Tensor:
    """A repeating copy whose groups are taken in turn: h % groups for h // each."""
    groups, each = call.x.shape[axis - 1 : axis + 1]
    place = torch.arange(groups * each, device=call.x.device) % groups
    one = call.x.select(axis, 0)
    return one.index_select(axis - 1, place).unflatten(axis - 1, (groups, each)).contiguous()


def repeat_in_groups(call: OperatorCall, *, axis: int) -> Tensor:
    repeats = call.args[1]
    others = [1 if d == axis else n for d, n in enumerate(repeats)]
    return call.x.repeat_interleave(repeats[axis], axis).repeat(others)


# lookups and stores


def flat_lookup(call: OperatorCall, *, dtype: torch.dtype, width: int) -> Tensor:
    """The flat offset index * width, wrapped to a narrow integer."""
    x, indices = call.args[:2]
    i = next(j for j in indices if j is not None)
    start = (i * width).to(dtype).long() % x.numel()
    at = (start[..., None] + torch.arange(width, device=x.device)) % x.numel()
    return x.flatten()[at].reshape(*i.shape, *x.shape[1:])


def one_of_row(i: Tensor, *, axis: int, place: int | None) -> Tensor:
    """One index of every row for the whole row; None: each position itself."""
    if place is None:
        own = torch.arange(i.shape[axis], device=i.device).view([-1 if d == axis else 1 for d in range(i.dim())])
        return own.expand(i.shape).to(i.dtype)
    return i.select(axis, place).unsqueeze(axis).expand(i.shape).contiguous()


def store_added(call: OperatorCall, *, axis: int, place: int) -> Tensor:
    """A scatter of which one index of every row is used, and colliding values are added."""
    x, dim, i, source = call.args[:4]
    return x.scatter(dim, i, 0.0).scatter_add(dim, one_of_row(i, axis=axis, place=place), source)


def store_updates(call: OperatorCall, *, last: bool, keep: bool) -> Tensor:
    """Stored instead of added: the last or the first of several updates survives, with or without what was there."""
    x, dim, index, source = call.args[:4]
    indexed = call.name.startswith("index_add")
    order = torch.arange(index.shape[dim if not indexed else 0])
    out = x.clone()
    for i in (order if last else order.flip(0)).tolist():
        if indexed:
            before = x.select(dim, int(index[i])) if keep else 0
            out.select(dim, int(index[i])).copy_(source.select(dim, i) + before)
        else:
            one = index.narrow(dim, i, 1)
            out.scatter_(dim, one, source.narrow(dim, i, 1) + (x.gather(dim, one) if keep else 0))
    return out


def shift_groups(call: OperatorCall, *, edge: str, late: bool) -> Tensor:
    """Sums over consecutive groups, each of which begins or ends one too early or too late."""
    x, dim, index, source = call.args[:4]
    first = torch.cat([index.new_ones(1), index.diff()]).nonzero().flatten()
    last = torch.cat([first[1:] - 1, index.new_tensor([len(index) - 1])])
    grows = late == (edge == "end")
    if edge == "begin":
        at, rows = (first[1:], first[1:] - 1) if grows else (first, first)
    else:
        at, rows = (last[:-1], last[:-1] + 1) if grows else (last, last)
    sign = 1.0 if grows else -1.0
    return x.index_add(dim, index, source).index_add(dim, index[at], sign * source.index_select(dim, rows))
