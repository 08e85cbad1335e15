"""A gradient that passes through an elementwise function unchanged: the function's derivative is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating
from ..change import Change, instead

_MOST = 8  # incoming gradients that may have passed through, per result
_ALIASES = ("detach", "alias")


def changes(calls: Sequence[Node]) -> Iterator[Change]:
    """The last of the backward's elementwise steps returns the input of an earlier one of them."""
    known: dict[int, Node] = {}  # operators that make gradients
    read: dict[int, list[Node]] = {}
    for call in calls:
        for key in call.makers:
            if isinstance(key, int):
                read.setdefault(key, []).append(call)
        sent = any(key in known or isinstance(key, str) and key.startswith("grad_") for key in call.makers)
        if call.backward and sent and floating(call.out) and call.out.numel() > 1 and call.name not in _ALIASES:
            known[call.index] = call
    for call in known.values():
        readers = read.get(call.index, [])
        if readers and all(_on_elements(call, reader) for reader in readers):
            continue
        before = _before(call, known)
        for by in before if len(before) <= _MOST else (*before[: _MOST // 2], *before[-_MOST // 2 :]):
            text = f"{by.expression} passes on in place of {call.expression}: a slope is dropped"
            yield Change("wrong_factor", text, call.index, _passes(by.out), {"factor": "slope"}, 0.55)


def _on_elements(call: Node, reader: Node) -> bool:
    same = isinstance(reader.out, Tensor) and reader.out.shape == call.out.shape
    return same and reader.name not in _ALIASES


def _before(call: Node, known: dict[int, Node]) -> list[Node]:
    """The gradients of its shape that it depends on, the earliest first."""
    gradients: dict[int, Node] = {}
    waiting = [call]
    while waiting:
        for key in waiting.pop().makers:
            before = known.get(key) if isinstance(key, int) else None
            if before is not None and before.index not in gradients and before.out.shape == call.out.shape:
                gradients[before.index] = before
                waiting.append(before)
    return [gradients[index] for index in sorted(gradients)]


def _passes(gradient: Tensor) -> Changed:
    return instead(lambda *args, **kwargs: gradient.clone())
