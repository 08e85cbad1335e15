"""Backward sums that are 0 for every input, such as the path of a norm's mean through its variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..edits.golden_edit import RESULT, Action, do
from ..edits.primitives.formulas import applied
from ..edits.primitives.tensors import replace_by
from ..graph.node import Key, Node, maker_of
from ..graph.tensors import floating

_SUMS = frozenset("add add_ sub sub_".split())
_LEAST = 1e-12  # relative to the addends' size: a smaller sum is zero for every input


def vanishing(calls: Sequence[Node], among: set[int]) -> dict[int, Action]:
    """Backward sums that are 0 for every input, or have such an addend, with an action that keeps them as they are.

    An example is the path of a norm's mean through its variance: a kernel's formula does not have it. When another
    operator is changed, autograd's value of that path is no longer 0.
    """
    zeroed: dict[int, Action] = {}
    sizes: dict[Key, float] = {}  # key -> size of the cancelling addends; a maximum that is subtracted has no gradient
    for call in calls:
        if not (call.backward and call.index in among and floating(call.out) and call.out.numel()):
            continue
        if call.name in ("add", "sub") and len(call.makers) == 2:
            size = max(
                [sizes.get(key, 0.0) for key in call.makers] + [float(t.detach().abs().amax()) for t in call.tensors]
            )
            if size > 0 and bool((call.out.abs() <= _LEAST * size).all()):
                zeroed[call.index] = Action(call.index, RESULT, do(applied, of=torch.zeros_like))
                sizes[call.index] = size
        if call.name != "sum":
            continue
        maker, addends = _maker(calls, call.makers[0]), [call.args[0]]
        if maker is not None and maker.name == "neg":
            maker = _maker(calls, maker.makers[0])
        if maker is not None and maker.name in _SUMS and maker.out.shape == call.args[0].shape:
            addends += [t for t in maker.tensors[:2] if t.shape == maker.out.shape]
        if any(_vanishes(call, t) for t in addends):
            zeroed[call.index] = Action(call.index, RESULT, do(replace_by, new=call.out))
    return zeroed


def _vanishes(call: Node, addend: Tensor) -> bool:
    axes = call.args[1] if len(call.args) > 1 and call.args[1] else list(range(addend.dim()))
    size, total = addend.abs().sum(axes), addend.sum(axes).abs()
    return bool((size > 0).any()) and bool((total <= _LEAST * size).all())


def _maker(calls: Sequence[Node], key: Key) -> Node | None:
    maker = maker_of(calls, key)
    return maker if maker is not None and maker.backward and maker.owns else None
