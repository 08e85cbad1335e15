"""Wrong factors in one addend of a gradient: a forward value is left out there, or multiplied in once more.

Kernels group the factors of a gradient differently from autograd. For example x_hat is one factor in a kernel and
several in autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating
from ..call_groups import signature
from ..change import Change, instead, with_result

_SUMS = frozenset("add add_ sub sub_".split())
_PRODUCTS = frozenset("mul mm bmm mv".split())
_PLACING = frozenset("select_backward slice_backward neg expand unsqueeze_copy sum".split())
_ADDENDS, _FACTORS = 12, 24
_LEAST = 1e-12  # relative to the addends' size: a smaller sum is zero for every input


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    backward = [c for c in calls if c.backward and c.index in among]
    addends: dict[int, Node] = {}
    for call in backward:
        if call.name in _SUMS:
            for key in call.makers[:2]:
                maker = _maker(calls, key)
                if maker is not None and floating(maker.out) and maker.out.numel() > 1:
                    addends.setdefault(maker.index, maker)
    factors = _forward(calls)
    yield from _left_out(calls, backward)
    for addend in list(addends.values())[:_ADDENDS]:
        for name, scale in factors:
            alike = scale.numel() == addend.out.numel() and addend.out.is_contiguous()
            factor = scale.reshape(addend.out.shape) if alike else scale
            if not _fits(factor, addend.out) or bool((factor == 0).any()):
                continue
            params = {"factor": name, "named": f"1/{name}"}
            text = f"{name} is left out of the addend {addend.expression}"
            yield Change("wrong_factor", text, addend.index, _times(1 / factor), params, 0.5)
            text = f"{name} enters the addend {addend.expression} once more"
            yield Change("wrong_factor", text, addend.index, _times(factor), {**params, "named": name}, 0.5)


def _left_out(calls: Sequence[Node], backward: Sequence[Node]) -> Iterator[Change]:
    """One of the paths contributes nothing, in every iteration of a loop."""
    ways: dict[tuple, dict[int, Node]] = {}
    for call in backward:
        for i, key in enumerate(call.makers[:2] if call.name in _SUMS else ()):
            maker = _maker(calls, key)
            if maker is not None and floating(maker.out):
                ways.setdefault((call.line, call.name, i, maker.name, maker.line), {})[maker.index] = maker
                ways.setdefault((maker.name, maker.line), {})[maker.index] = maker
                ways.setdefault((maker.name, *signature(calls, _source(calls, maker))), {})[maker.index] = maker
        if call.name in _PRODUCTS and call.owns and floating(call.out):
            ways.setdefault(signature(calls, call), {})[call.index] = call
    seen = set()
    for members in ways.values():
        at = tuple(sorted(members))
        if at in seen:
            continue
        seen.add(at)
        group = tuple((index, with_result(torch.zeros_like)) for index in at)
        first = members[at[0]]
        often = f", in {len(group)} places" if len(group) > 1 else ""
        text = f"nothing comes through {first.expression}{often}"
        more = {"term": first.expression}
        prior = 0.55 if first.name in _PRODUCTS else 0.6
        yield Change("missing_term", text, at[0], group[0][1], more, prior, group=group if len(group) > 1 else ())


def _source(calls: Sequence[Node], call: Node) -> Node:
    """The gradient before it is scattered into a larger one (select, slice, expand)."""
    while call.name in _PLACING and call.makers:
        before = _maker(calls, call.makers[0])
        if before is None:
            break
        call = before
    return call


def _maker(calls: Sequence[Node], key: Key) -> Node | None:
    maker = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    return maker if maker is not None and maker.backward and maker.owns else None


def _forward(calls: Sequence[Node]) -> list[tuple[str, Tensor]]:
    """The forward's inputs and results with several elements, by name; the latest tensor of a name wins."""
    tensors: dict[Key, tuple[str, Tensor]] = {}
    for call in calls:
        for key, name, tensor in zip(call.makers, call.operands, call.tensors, strict=True):
            known = not call.backward or key in tensors
            if known and floating(tensor) and tensor.numel() > 1 and key != -1 and not str(key).startswith("grad_"):
                tensors[key] = name or "an intermediate", tensor
    return list(tensors.values())[:_FACTORS]


def _fits(factor: Tensor, addend: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(factor.shape, addend.shape) == addend.shape
    except RuntimeError:
        return False


def _times(factor: Tensor) -> Changed:
    return with_result(lambda out: out * factor)


def vanishing(calls: Sequence[Node], among: set[int]) -> dict[int, Changed]:
    """Backward sums that are 0 for every input, or that have such an addend, with a change that keeps them as they are.

    An example is the path of a norm's mean through its variance: a kernel's formula does not have it. When another
    operator is changed, autograd's value of that path is no longer 0.
    """
    zeroed: dict[int, Changed] = {}
    sizes: dict[Key, float] = {}  # key -> size of the cancelling addends; a maximum that is subtracted has no gradient
    for call in calls:
        if not (call.backward and call.index in among and floating(call.out) and call.out.numel()):
            continue
        if call.name in ("add", "sub") and len(call.makers) == 2:
            size = max(
                [sizes.get(key, 0.0) for key in call.makers] + [float(t.detach().abs().amax()) for t in call.tensors]
            )
            if size > 0 and bool((call.out.abs() <= _LEAST * size).all()):
                zeroed[call.index], sizes[call.index] = with_result(torch.zeros_like), size
        if call.name != "sum":
            continue
        maker, addends = _maker(calls, call.makers[0]), [call.args[0]]
        if maker is not None and maker.name == "neg":
            maker = _maker(calls, maker.makers[0])
        if maker is not None and maker.name in _SUMS and maker.out.shape == call.args[0].shape:
            addends += [t for t in maker.tensors[:2] if t.shape == maker.out.shape]
        if any(_vanishes(call, t) for t in addends):
            zeroed[call.index] = instead(lambda *args, out=call.out, **kwargs: out.clone())
    return zeroed


def _vanishes(call: Node, addend: Tensor) -> bool:
    axes = call.args[1] if len(call.args) > 1 and call.args[1] else list(range(addend.dim()))
    size, total = addend.abs().sum(axes), addend.sum(axes).abs()
    return bool((size > 0).any()) and bool((total <= _LEAST * size).all())
