"""Log-space recursions whose backward recomputes each pair's share with the state of another iteration.

s(t)[j] = log sum_i exp(s(t-1)[i] + a[i, j]) + ...: a kernel adds exp(s(t-1)[i] + a[i, j] + rest - total) to the
gradient of a, using the stored states. With the state of its own iteration, or of two iterations before, every share
has a wrong factor, while the gradient that is passed to the previous iteration stays right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...graph.graph import Graph
from ...graph.node import Key, Node
from ...graph.tensors import floating
from ..golden_edit import Action, GoldenEdit, NamedEdit, Source, do
from ..primitives.formulas import with_other_state

_LEAST, _MOST = 2, 1024  # iterations
_SUMS = frozenset("add add_ sum".split())
_DEPTH = 4


class _Turn(NamedTuple):
    """One iteration: its share in the backward, the operand that reads the state, the operator that makes the next."""

    share: Node
    read: tuple[int, int]
    made: int
    before: Key


def edits(graph: Graph) -> Iterator[NamedEdit]:
    turns = _turns(graph)
    if not _LEAST <= len(turns) <= _MOST:
        return
    earlier: set[Key] = set()  # tensors that a share depends on: the gradient passed to the previous iteration
    for node in reversed(graph.nodes):
        if node.index in earlier or any(node is turn.share for turn in turns):
            earlier.update(node.read)
    reads_of: dict[Key, list[tuple[int, int]]] = {}
    for node, i, key, _ in graph.operands():
        if node.backward and node.name in _SUMS and node.index in graph.behind and node.index not in earlier:
            reads_of.setdefault(key, []).append((node.index, i))
    read_in: dict[Key, Source] = {turn.made: turn.read for turn in turns}
    for step, which in ((1, "after the step"), (-1, "of two steps before")):
        actions = []
        for turn in turns:
            other = turn.made if step > 0 else read_in.get(turn.before)
            if other is not None:
                reads = ("own", turn.read), ("other", other)
                actions += [Action(at, i, do(with_other_state), reads) for at, i in reads_of.get(turn.share.index, [])]
        adds = graph.nodes[turns[0].read[0]]
        text = f"in each of {len(turns)} steps the backward computes the shares of {adds.expression} from the state "
        if actions:
            yield NamedEdit("wrong_saved_tensor", text + which, GoldenEdit(tuple(actions), adds.line), 0.6,
                            {"step": step}, ("shifted", "off_by_one"))  # fmt: skip


def _turns(graph: Graph) -> list[_Turn]:
    """Of the additions before each logsumexp, those at the place where most iterations add an earlier state."""
    shares = {total.index: node for node in graph.nodes for total in _totals(graph, node)}
    made = {at: _made(graph, graph.nodes[at]) for at in sorted(shares)}
    ways = {at: dict(_states(graph, graph.nodes[at].makers[0], graph.nodes[at])) for at in made}
    states = set(made.values())
    usual = [way for found in ways.values() for way, (node, i) in found.items() if node.makers[i] in states]
    way = max(usual, key=usual.count, default=())
    return [
        _Turn(shares[at], (node.index, i), made[at], node.makers[i])
        for at in made if way in ways[at] for node, i in [ways[at][way]]
    ]  # fmt: skip


def _states(graph: Graph, key: Key, total: Node, way: tuple = ()) -> Iterator[tuple[tuple, tuple[Node, int]]]:
    """The operands of the additions that make a summed tensor that have one number for each sum, by their path."""
    node = graph.maker(key)
    if node is None or node.name not in ("add", "sub") or len(node.makers) != 2 or len(way) == _DEPTH:
        return
    for i in range(1 if node.name == "sub" else 2):  # a subtracted operand is not a state
        if floating(node.args[i]) and node.args[i].numel() == total.out.numel():
            yield (*way, i), (node, i)
        yield from _states(graph, node.makers[i], total, (*way, i))


def _totals(graph: Graph, node: Node) -> Iterator[Node]:
    """The logsumexp l of a backward product g exp(x - l)."""
    for key in node.makers if node.backward and node.name == "mul" and node.index in graph.behind else ():
        bent = graph.maker(key)
        apart = graph.maker(bent.makers[0]) if bent is not None and bent.name == "exp" and bent.makers else None
        total = graph.maker(apart.makers[1]) if apart is not None and len(apart.makers) == 2 else None
        if apart is not None and total is not None and total.name == "logsumexp" and total.makers == apart.makers[:1]:
            yield total


def _made(graph: Graph, total: Node) -> int:
    """The next state: the first forward result of the sum's shape that reads it, or the sum."""
    for node in graph.nodes[total.index + 1 :]:
        if not node.backward and total.index in node.makers and node.owns and floating(node.out):
            if node.out.shape == total.out.shape:
                return node.index
    return total.index
