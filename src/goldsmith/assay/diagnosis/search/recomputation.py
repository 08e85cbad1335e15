"""Changes of what the backward recomputes from the forward: probabilities from scores, masks, activations.

A kernel that stores the logarithm of a softmax's sum instead of the probabilities recomputes them from new scores and
the old sum. A formula that is right in the forward may be wrong in this recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..edits.golden_edit import CALL, Action, EditedRun, GoldenEdit, NamedEdit, OperatorCall, do
from ..edits.primitives.formulas import inner_product
from ..graph.graph import followed
from ..graph.node import Changed, Instead, Key, Node
from ..graph.tensors import floating

_MOST = 600  # changes
_RARER = 0.08
_SUMS = frozenset(("_softmax", "_log_softmax", "logsumexp"))
_MASKS = frozenset("masked_fill where tril triu".split())


def changes(calls: Sequence[Node], by_call: Mapping[int, Sequence[NamedEdit]], tensor: str) -> Iterator[NamedEdit]:
    """These changes affect gradients only; in the forward they would make the outputs wrong as well."""
    if not tensor.endswith(".grad"):
        return
    read = {k for call in calls if call.backward for k in call.read}
    reaching = _reaching(calls, read)
    offers = []
    inner = _old_inner(calls)
    for call in calls:
        if call.backward or call.index not in reaching or not call.owns or call.func is None:
            continue
        if call.func._schema.is_mutable or not isinstance(call.out, Tensor):
            continue
        below = call.name in _SUMS or _summed_below(calls, call)
        masks = _in_backward(calls, call) if call.name in _MASKS else ()
        for change in by_call.get(call.index, ()):
            places = EditedRun(change.edit).changes()
            if [at for at, _ in places] != [call.index] or change.free is not None or change.edit.wrap:
                continue
            for kept in (True, False) if below else (False,):
                how = ", as the backward makes it again" + (" with the forward's sums" if kept else "")
                edit = GoldenEdit(inner if kept else ())
                offers.append(replace(
                    change, text=change.text + how, edit=edit, saved=_remade(calls, call, places[0][1], kept),
                    prior=change.prior - _RARER - 0.01 * (below and not kept),
                ))  # fmt: skip
                if masks:  # a kernel takes them from the same line: nothing cuts the gradient either
                    offers.append(replace(offers[-1], edit=GoldenEdit((*edit.actions, *masks))))
    yield from sorted(offers, key=lambda c: -c.prior)[:_MOST]


def _old_inner(calls: Sequence[Node]) -> tuple[Action, ...]:
    """Softmax gradients whose inner product is right: kernels take it from the output, not from the weights."""
    softmaxes = [c for c in calls if c.name == "_softmax_backward_data" and c.backward]
    return tuple(
        Action(c.index, CALL, do(with_inner, inner=inner_product(c.args[0], c.args[1], c.args[2]))) for c in softmaxes
    )


def with_inner(call: OperatorCall, *, inner: Tensor) -> Tensor:
    g, y = call.args[:2]
    return y * (g - inner)


def _in_backward(calls: Sequence[Node], call: Node) -> tuple[Action, ...]:
    """Removes the mask that an operator of the forward applies to the gradient."""
    alike = [c for c in calls if c.backward and c.line and c.line == call.line and c.name in _MASKS]
    return tuple(Action(c.index, CALL, do(passing)) for c in alike)


def passing(call: OperatorCall) -> Tensor:
    return next(a for a in call.args if floating(a) and a.numel() > 1).clone()


def _remade(calls: Sequence[Node], call: Node, change: Changed, kept: bool) -> Instead:
    def instead(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        new = change(call.func, call.args, call.kwargs)
        if not isinstance(new, Tensor) or new.shape != call.out.shape:
            return {}
        return followed(list(calls), {call.index: new.to(call.out.dtype)}, None, _with_old_sum if kept else None)

    return instead


def _with_old_sum(call: Node, args: Sequence) -> Tensor | None:
    """A softmax of new arguments divided by the old sum; the sum itself stays."""
    if call.name == "logsumexp":
        return call.out
    if call.name in ("_softmax", "_log_softmax"):
        total = torch.logsumexp(call.args[0], call.args[1], keepdim=True)
        log = args[0] - total
        return log if call.name == "_log_softmax" else torch.exp(log)
    return None


def _reaching(calls: Sequence[Node], read: set[Key]) -> set[int]:
    """The forward operators that the tensors read by the backward depend on."""
    known: set[Key] = set(read)
    for call in reversed(calls):
        if not call.backward and call.index in known:
            known.update(call.read)
        elif not call.backward and not call.owns and call.makers and call.makers[0] in known:
            known.update(call.read)
    return {k for k in known if isinstance(k, int)}


def _summed_below(calls: Sequence[Node], call: Node) -> bool:
    """Whether a softmax, or its sum, depends on it."""
    known: set[Key] = {call.index}
    for other in calls[call.index + 1 :]:
        if other.backward:
            break
        if known.intersection(other.read):
            if other.name in _SUMS:
                return floating(other.out)
            known.add(other.index)
    return False
