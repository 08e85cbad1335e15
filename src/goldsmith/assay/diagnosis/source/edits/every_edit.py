"""EveryEdit: all single edits of a candidate, the many that bring in other expressions only for places in question."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..reading.candidate_source import BACKWARD, FORWARD, Part
from ..reading.source_file import first_line, head_lines
from ..reading.value_kinds import kinds_of
from .call_edits import call_edits
from .copied_statements import copied_statements, pairs_of_names
from .counterpart_edits import counterpart_edits
from .edits import Edit, Function, Line, Place, cheapest_first
from .mirrored_edits import mirrored_edits
from .neighbour_edits import neighbour_edits
from .repeated_edits import repeated_edits
from .scope_edits import name_edits, scope_edits
from .small_edits import small_edits
from .statement_edits import statement_edits

_BRANCHES = (ast.For, ast.While, ast.If)
_FEW = 4  # statements that read a name, until it says nothing about where a fault is
_OTHER_PHASE = 1.5  # cost of an edit where only the right phase can see it


class EveryEdit:
    """Every single edit of a candidate; those in the phase that computes right results cost more.

    near  edits that need little besides the node they change, of all places
    """

    def __init__(
        self, parts: Iterable[Part], wrong: Collection[str],
        kinds: Mapping[str, Mapping[str, str]] = MappingProxyType({}), golden: Iterable[Part] = (),
    ):  # fmt: skip
        """wrong: names of the wrong results; golden: its functions."""
        listed = list(parts)
        gradients = bool(wrong) and all(n.endswith(".grad") for n in wrong)
        phase = BACKWARD if gradients and any(p.phases == {BACKWARD} for p in listed) else FORWARD
        self.functions = [_function(p, 0.0 if phase in p.phases else _OTHER_PHASE, kinds) for p in listed]
        known = [_function(p, 0.0, {}) for p in golden]
        near = [e for f in self.functions for e in near_edits(f, [g for g in self.functions if g is not f], known)]
        self.near = self._everywhere(near)
        self.done: set[Place] = set()

    def far(self, places: Collection[Place] | None = None) -> list[Edit]:
        """Edits that bring in other expressions of the scope, in these places, or in all others; each only once."""
        found: list[Edit] = []
        for function in self.functions:
            own = {n for n in function.places if places is None or n in places} - self.done
            self.done |= own
            if own:
                beside = [f for f in self.functions if f is not function]
                lines = {line for _, line in own}
                found += [*scope_edits(function, beside, lines), *neighbour_edits(function, lines)]
        return self._everywhere(found)

    def _everywhere(self, edits: Sequence[Edit]) -> list[Edit]:
        """These edits, and each also wherever the same expression stands, or one that is alike."""
        more = *repeated_edits(edits, self.functions), *mirrored_edits(edits, self.functions)
        return cheapest_first([*edits, *more])

    def around(self, lines: Collection[Line]) -> set[Place]:
        """What shows first in these lines: the loops and conditions around them, the calls of their functions with the
        arguments, and what they call themselves.
        """
        named = {function for _, _, function in lines} - {""}
        found = set[Place]()
        for f in self.functions:
            for n in f.nodes:
                if isinstance(n, _BRANCHES):
                    if any(path == f.file.path and n.lineno < line <= (n.end_lineno or 0) for path, line, _ in lines):
                        found.add((f.file.path, n.lineno))
                elif isinstance(n, ast.Call):
                    statement = f.statement(n)
                    if statement is not None and _called(n) in named:
                        found.add((f.file.path, statement.lineno))
                    if statement is not None and any((f.file.path, n.lineno) == (p, line) for p, line, _ in lines):
                        found |= {place for g in self.functions for place in g.places if g.name == _called(n)}
        return found

    @property
    def branches(self) -> set[Place]:
        """Loops and conditions, which decide what runs: no operation reads their value."""
        return {(f.file.path, n.lineno) for f in self.functions for n in f.nodes if isinstance(n, _BRANCHES)}

    def reading(self, words: Collection[str]) -> set[Place]:
        """The statements that read one of these names, if they are few."""
        found: dict[str, set[Place]] = {}
        for f in self.functions:
            for n in f.nodes:
                if isinstance(n, ast.Name) and n.id in words and n.id not in f.called:
                    statement = f.statement(n)
                    if statement is not None and isinstance(n.ctx, ast.Load):
                        found.setdefault(n.id, set()).add((f.file.path, statement.lineno))
        return {place for places in found.values() if len(places) <= _FEW for place in places}

    def places(self, lines: Collection[tuple[str, int]]) -> set[Place]:
        """The statements in which these lines are; of a loop or a condition, only the head counts."""
        return {
            (f.file.path, n.lineno)
            for f in self.functions
            for n in f.nodes
            if isinstance(n, ast.stmt) and any((f.file.path, line) in lines for line in head_lines(n))
        }


def _called(node: ast.Call) -> str:
    """The name of a function that is called or launched."""
    callee = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return getattr(callee, "id", getattr(callee, "attr", ""))


def near_edits(function: Function, beside: Sequence[Function] = (), golden: Sequence[Function] = ()) -> list[Edit]:
    pairs = pairs_of_names(function)
    like_others = (
        *counterpart_edits(function, beside, golden, pairs),
        *copied_statements(function, beside, golden, pairs),
    )
    calls = call_edits(function, beside)
    return [*small_edits(function), *calls, *statement_edits(function), *name_edits(function), *like_others]


def _function(part: Part, penalty: float, kinds: Mapping[str, Mapping[str, str]]) -> Function:
    name = getattr(part.node, "name", "<lambda>")
    lines = range(first_line(part.node), part.node.lineno + 1)  # type: ignore[attr-defined]
    return Function(part.file, part.node, penalty, kinds_of(kinds, part.file.path, name, lines))
