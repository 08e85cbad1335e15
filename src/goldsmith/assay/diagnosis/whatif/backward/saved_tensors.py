"""The backward reads another forward tensor than the golden's backward, or the right one in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.node import Key, Node
from ...graph.tensors import floating, seen_through, whole
from ..change import Change

_MOST = 24  # tensors that may be confused, and as many that may replace them
_ORDERS = 6  # orders in which rows may be read
_MOVES = frozenset("index_select index gather clone _to_copy contiguous masked_fill embedding".split())
Moved = tuple[str, Callable[[Tensor], Tensor]]


def changes(calls: list[Node], saved: Sequence[str] = ()) -> Iterator[Change]:
    forward: dict[Key, str] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    read: dict[Key, str] = {}
    for call in calls:
        for key, name, tensor in zip(call.makers, call.operands, call.tensors, strict=True):
            if not floating(tensor) or tensor.numel() < 2 or key == -1:
                continue
            if not call.backward:
                forward[key] = name  # the last name wins: a stage is named after it was computed
                shapes[key] = tuple(tensor.shape)
            elif key in forward:
                read.setdefault(key, name)
        if not call.backward and floating(call.out) and call.out.numel() > 1:
            forward.setdefault(call.index, call.expression)
            shapes.setdefault(call.index, tuple(call.out.shape))
    meant = {**_sources(calls, read, forward), **read}
    for what, name in list(meant.items())[:_MOST]:
        others = [k for k in forward if k != what and shapes[k] == shapes[what]]
        for by in others[:_MOST]:
            yield _read_instead(calls, what, by, name, forward[by])
    handed = {k: n for k, n in {**forward, **read}.items() if n in saved}
    yield from _reordered(calls, read, handed, shapes)


def _sources(calls: Sequence[Node], read: Mapping[Key, str], forward: Mapping[Key, str]) -> dict[Key, str]:
    """The tensors that the read ones are copies, or rows, of."""
    names: dict[Key, str] = {}
    for key in read:
        while isinstance(key, int) and 0 <= key < len(calls) and calls[key].name in _MOVES and calls[key].makers:
            key = calls[key].makers[0]
            if key in forward:
                names.setdefault(key, forward[key])
    return names


def _read_instead(calls: list[Node], what: Key, by: Key, name: str, other: str) -> Change:
    """An operand in place of its product or sum is a factor, or a term, left out."""
    text, cause, params = f"the backward reads {other} in place of {name}", "wrong_saved_tensor", {}
    maker = calls[what] if isinstance(what, int) and 0 <= what < len(calls) else None
    if maker is not None and by in maker.makers and len(maker.operands) == 2:
        left_out = maker.operands[1 - maker.makers.index(by)] or "the other"
        if maker.name in ("mul", "div"):
            cause, params = "wrong_factor", {"factor": left_out, "named": f"1/{left_out}"}
        if maker.name in ("add", "sub"):
            cause, params = "missing_term", {"term": left_out}

    also: tuple[str, ...] = ()
    whole = calls[by] if isinstance(by, int) and 0 <= by < len(calls) else None
    if cause == "wrong_saved_tensor" and whole is not None and what in whole.makers and whole.name in ("mul", "div"):
        cause, also = "wrong_factor", ("wrong_saved_tensor",)  # a product in place of its factor
        params = {"factor": whole.expression}

    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        old, new = tensors.get(what), tensors.get(by)
        if old is None or new is None or old.numel() != new.numel():
            return {}
        return followed(calls, {what: new.reshape(old.shape)}, _MOVES)

    return Change(cause, text, -1, None, {"saved": name, "by": other, **params}, 0.5, saved=instead, also=also)


def _reordered(
    calls: list[Node], read: Mapping[Key, str], handed: Mapping[Key, str], shapes: Mapping[Key, tuple[int, ...]]
) -> Iterator[Change]:
    """Rows in another order: of all saved tensors and their results together, or of one tensor."""
    together = {n for n in (shapes[k][0] for k in handed if shapes[k])}
    for n in sorted({shape[0] for k, shape in shapes.items() if k in read and shape and shape[0] > 2}):
        for order_name, move in _orders(calls, n):
            if n in together:
                kept = [k for k in handed if shapes[k] and shapes[k][0] == n]
                names = ", ".join(handed[k] for k in kept)
                yield _in_order(calls, kept, names, order_name, move, 0.6)
            for key in [k for k in read if shapes[k] and shapes[k][0] == n][:_MOST]:
                yield _in_order(calls, [key], read[key], order_name, move, 0.5)


def _in_order(calls: list[Node], keys: list[Key], names: str, order_name: str, move: Callable, prior: float) -> Change:
    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        return followed(calls, {k: move(tensors[k]) for k in keys if k in tensors}, None)

    text = f"the backward reads the rows of {names} {order_name}"
    return Change("permuted", text, -1, None, {"saved": names, "axis": 0}, prior, saved=instead)


def _orders(calls: Sequence[Node], n: int) -> list[Moved]:
    """The orders of n rows that the golden uses, their inverses, and the reverse order."""
    orders: dict[tuple[int, ...], Moved] = {}

    def known(order_name: str, index: Tensor) -> None:
        key = tuple(index.tolist())
        if key != tuple(range(n)):
            orders.setdefault(key, (order_name, lambda t, i=index: t.index_select(0, i.to(t.device))))  # type: ignore[misc]

    for call in calls:
        for out in call.out if isinstance(call.out, list | tuple) else (call.out,):
            if whole(out) and out.dim() == 1 and len(out) == n and len(orders) < _ORDERS:
                index = out.long()
                if torch.equal(index.sort().values, torch.arange(n, device=index.device)):
                    known(f"in the order of {call.expression}", index)
                    known(f"in the order that {call.expression} undoes", index.argsort())
    known("in reverse order", torch.arange(n).flip(0))
    return list(orders.values())


def followed(
    calls: Sequence[Node], new: dict[Key, Tensor], through: frozenset[str] | None,
    otherwise: Callable[[Node, Sequence], Tensor | None] | None = None,
) -> dict[Key, Tensor]:  # fmt: skip
    """The tensors of `new`, and the forward results recomputed from them by these operators; None: by any.

    otherwise  an operator's changed result for the new arguments; None if it is unchanged
    """
    tensors = {key: t.contiguous() for key, t in new.items()}
    for call in calls:
        if call.backward or not any(key in tensors for key in call.makers) or call.index in tensors:
            continue
        own = isinstance(call.out, Tensor) and call.func is not None and call.owns
        if not own or (through is not None and call.name not in through):
            continue
        keys = iter(call.makers)
        args = []
        for a in call.args:
            result = tensors.get(next(keys)) if isinstance(a, Tensor) else None
            args.append(a if result is None else seen_through(result, a))
        if all(a is not None for a, b in zip(args, call.args, strict=True) if b is not None):
            other = None if otherwise is None else otherwise(call, args)
            tensors[call.index] = (call.func(*args, **call.kwargs) if other is None else other).contiguous()
    return tensors
