"""Weights of the chosen entries: normalised over the chosen ones or over all; vectors applied along the wrong axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import CALL, RESULT, Action, NamedEdit, do, named
from ..primitives.repartitions import divide_by_sum, shares_of_all
from ..primitives.tensors import constant

_AXES = {"topk": 2, "sort": 1, "gather": 1}  # operator -> position of its axis among the arguments
_NORMED = ("_softmax", "sigmoid")


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name == "_softmax":
        yield from _among_all(node, nodes)
    if node.name in ("topk", "gather"):
        maker = _maker(nodes, node)
        if maker is not None and maker.name in _NORMED:
            text = f"the values that {node.expression} chooses are divided by their sum"
            divided = (RESULT if node.name == "gather" else CALL), do(divide_by_sum, axis=_axis(node))
            yield named(node, "wrong_factor", 0.55, text, divided, axis=_axis(node))
    if node.name == "unsqueeze" and floating(node.out) and node.out.dim() == 2 and node.args[0].dim() == 1:
        axis = 1 if node.out.shape[0] == 1 else 0
        text = f"{node.operand(0) or 'a vector'} lies along axis {1 - axis} instead of {axis}"
        yield named(node, "wrong_axis", 0.6, text, (1, do(constant, new=axis)), also=("wrong_stride",),
                    axis=1 - axis, golden_axis=axis)  # fmt: skip


def _maker(nodes: Sequence[Node], node: Node) -> Node | None:
    key = node.makers[0] if node.makers else -1
    return nodes[key] if isinstance(key, int) and 0 <= key < len(nodes) else None


def _axis(node: Node) -> int:
    at = _AXES[node.name]
    return (node.args[at] if len(node.args) > at else -1) % max(node.args[0].dim(), 1)


def _among_all(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    """The chosen entries' shares of the total: a softmax over all entries, not normalised again."""
    maker = _maker(nodes, node)
    if maker is None or maker.name not in _AXES or maker.args[0].dim() != node.args[0].dim():
        return
    axis = _axis(maker)
    if axis == node.args[1] % node.args[0].dim():
        text = f"the sum of {node.expression} runs over all entries, not over the chosen ones"
        places = (maker.index, 2) if maker.name == "gather" else maker.index
        shares = Action(node.index, CALL, do(shares_of_all, axis=axis), (("all", (maker.index, 0)), ("at", places)))
        yield named(node, "wrong_factor", 0.6, text, also=("wrong_mask",), axis=axis).acting(shares)
