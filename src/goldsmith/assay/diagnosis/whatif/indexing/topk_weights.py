"""Weights of the chosen entries: normalised over the chosen ones or over all; vectors applied along the wrong axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead

_CHOICES = ("topk", "sort", "gather")
_NORMED = ("_softmax", "sigmoid")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name == "_softmax":
        yield from _among_all(call, calls)
    if call.name in _CHOICES and call.name != "sort":
        yield from _again(call, calls)
    if call.name == "unsqueeze" and floating(call.out) and call.out.dim() == 2 and call.args[0].dim() == 1:
        yield _along_the_other(call)


def _maker(calls: Sequence[Node], call: Node) -> Node | None:
    key = call.makers[0] if call.makers else -1
    return calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None


def _axis(call: Node) -> int:
    at = {"topk": 2, "sort": 1, "gather": 1}[call.name]
    return (call.args[at] if len(call.args) > at else -1) % max(call.args[0].dim(), 1)


def _among_all(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """The chosen entries' shares of the total: a softmax over all entries, not normalised again."""
    maker = _maker(calls, call)
    if maker is None or maker.name not in _CHOICES or _axis(maker) != call.args[1] % call.args[0].dim():
        return
    axis, inputs = _axis(maker), dict[str, Tensor]()
    if maker.args[0].dim() != call.args[0].dim():
        return

    def kept(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        inputs["all"], inputs["at"] = args[0], args[2] if maker.name == "gather" else out[1]
        return out

    def shares(func: object, args: tuple, kwargs: dict) -> object:
        chosen = torch.softmax(inputs["all"], axis).gather(axis, inputs["at"])
        if chosen.shape != args[0].shape:
            raise RuntimeError("not all of what was chosen")
        return chosen

    text = f"the sum of {call.expression} runs over all entries, not over the chosen ones"
    group = ((maker.index, kept), (call.index, shares))
    yield Change("wrong_factor", text, call.index, shares, {"axis": axis}, 0.6, group=group, also=("wrong_mask",))


def _again(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """Shares that the golden keeps, divided by the sum of the chosen ones."""
    maker, axis = _maker(calls, call), _axis(call)
    if maker is None or maker.name not in _NORMED:
        return

    def divided(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        values = out if isinstance(out, Tensor) else out[0]
        values = values / values.sum(axis, keepdim=True)
        return values if isinstance(out, Tensor) else (values, *out[1:])

    text = f"the values that {call.expression} chooses are divided by their sum"
    yield Change("wrong_factor", text, call.index, divided, {"axis": axis}, 0.55)


def _along_the_other(call: Node) -> Change:
    """A vector of row factors used for columns, in a square matrix."""
    axis = 1 if call.out.shape[0] == 1 else 0
    text = f"{call.operand(0) or 'a vector'} lies along axis {1 - axis} instead of {axis}"
    change = instead(lambda x, *a, other=axis: x.unsqueeze(other))
    return Change("wrong_axis", text, call.index, change, {"axis": 1 - axis, "golden_axis": axis}, 0.6,
                  also=("wrong_stride",))  # fmt: skip
