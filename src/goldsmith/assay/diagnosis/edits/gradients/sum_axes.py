"""Sums in one addend of a gradient over other axes than the golden's: a group norm's sum over the whole row.

The sum itself cannot be edited, since autograd would reduce a result that is larger than expected. The addend that has
it as a factor is scaled instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ...graph.graph import Graph
from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..golden_edit import RESULT, Action, GoldenEdit, NamedEdit, do
from ..primitives.repartitions import sum_over
from ..reductions import axes_of, axis_sets, shapes_before

_ROWS = 3  # row factors to try


def edits(graph: Graph) -> Iterator[NamedEdit]:
    alike: dict[tuple, list[Action]] = {}
    for node in graph.nodes:
        addend = _addend(graph, node) if node.backward and node.index in graph.behind and node.name == "sum" else None
        if addend is None or not node.args[0].is_contiguous() or bool((node.out == 0).any()):
            continue
        x, own = node.args[0], tuple(sorted(axes_of(node)))
        for shape in shapes_before(node, graph.nodes):
            for over in axis_sets(len(shape)):
                same, wide = shape == tuple(x.shape), prod(shape[a] for a in over)
                if same and over == own or wide < 2:
                    continue
                for row in (None, *(_rows(graph, node, own) if same and set(over) > set(own) else ())):
                    for share in {1.0, prod(x.shape[a] for a in own) / wide}:
                        by = "" if share == 1.0 else ", and is divided by their lengths"
                        text = f"{node.expression} runs along axes {', '.join(map(str, over))} of {list(shape)} "
                        text += f"instead of {list(own)}{by}"
                        reads = (("x", (node.index, 0)), *((("row", row),) if row is not None else ()))
                        spread = do(sum_over, shape=shape, axes=over, own=own, share=share)
                        action = Action(addend.index, RESULT, spread, reads)
                        if row is None:
                            alike.setdefault((text.split(" runs ")[1], addend.line), []).append(action)
                        yield NamedEdit("wrong_axis", text, GoldenEdit((action,), addend.line), 0.57 - 0.01 * bool(by),
                                        {"axis": over[0]})  # fmt: skip
    for (how, line), actions in alike.items():
        if len({action.at for action in actions}) == len(actions) > 1:
            text = f"each of {len(actions)} sums runs {how}"
            yield NamedEdit("wrong_axis", text, GoldenEdit(tuple(actions), line), 0.55)


def _rows(graph: Graph, node: Node, own: tuple[int, ...]) -> list[int]:
    """Forward results with one number for each sum, by which a kernel may multiply before it sums."""
    shape = tuple(1 if d in own else n for d, n in enumerate(node.args[0].shape))
    rows = [n for n in graph.nodes if not n.backward and n.owns and floating(n.out) and tuple(n.out.shape) == shape]
    return [n.index for n in rows if n.out.numel() > 1 and not bool((n.out == 0).any())][-_ROWS:]


def _addend(graph: Graph, node: Node) -> Node | None:
    """The first addend of the summed tensor's size that has the sum as a factor."""
    reached: set[Key] = {node.index}
    size = node.args[0].numel()
    for other in graph.nodes[node.index + 1 :] if floating(node.out) and node.args[0].dim() else ():
        if other.index not in graph.behind or not reached.intersection(other.read):
            continue
        for key, t in zip(other.makers, other.tensors, strict=True) if other.name in ("add", "sub") else ():
            maker = graph.maker(key)
            if key in reached and t.numel() == size and maker is not None and maker.owns:
                return maker if maker.out.numel() == size and maker.out.is_contiguous() else None
        reached.add(other.index)
    return None
