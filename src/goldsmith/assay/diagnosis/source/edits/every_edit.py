"""EveryEdit: all single edits of a candidate, the many that bring in other expressions only for places in question."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ..reading.candidate_source import BACKWARD, FORWARD, Part
from ..reading.source_file import first_line, head_lines
from ..reading.value_kinds import kinds_of
from .call_edits import call_edits
from .edits import Edit, Function, Place, cheapest_first
from .scope_edits import name_edits, scope_edits
from .small_edits import small_edits
from .statement_edits import statement_edits
from .twin_edits import twin_edits

_OTHER_PHASE = 1.5  # cost of an edit where only the right phase can see it


class EveryEdit:
    """Every single edit of a candidate; those in the phase that computes right results cost more.

    near  edits that need little besides the node they change, of all places
    """

    def __init__(
        self, parts: Iterable[Part], wrong: Collection[str],
        kinds: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ):  # fmt: skip
        """wrong: names of the wrong results."""
        listed = list(parts)
        gradients = bool(wrong) and all(n.endswith(".grad") for n in wrong)
        phase = BACKWARD if gradients and any(p.phases == {BACKWARD} for p in listed) else FORWARD
        self.functions = [_function(p, 0.0 if phase in p.phases else _OTHER_PHASE, kinds) for p in listed]
        self.near = cheapest_first(e for f in self.functions for e in near_edits(f))
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
                found += [*scope_edits(function, beside, lines), *twin_edits(function, beside, lines)]
        return cheapest_first(found)

    def around(self, lines: Collection[tuple[str, int]]) -> set[Place]:
        """The loops and conditions in whose bodies these lines are: their bounds show there first."""
        return {
            (f.file.path, n.lineno)
            for f in self.functions
            for n in f.nodes
            if isinstance(n, ast.For | ast.While | ast.If)
            and any(path == f.file.path and n.lineno < line <= (n.end_lineno or 0) for path, line in lines)
        }

    def places(self, lines: Collection[tuple[str, int]]) -> set[Place]:
        """The statements in which these lines are; of a loop or a condition, only the head counts."""
        return {
            (f.file.path, n.lineno)
            for f in self.functions
            for n in f.nodes
            if isinstance(n, ast.stmt) and any((f.file.path, line) in lines for line in head_lines(n))
        }


def near_edits(function: Function) -> list[Edit]:
    return [*small_edits(function), *call_edits(function), *statement_edits(function), *name_edits(function)]


def _function(part: Part, penalty: float, kinds: Mapping[str, Mapping[str, str]]) -> Function:
    name = getattr(part.node, "name", "<lambda>")
    lines = range(first_line(part.node), part.node.lineno + 1)  # type: ignore[attr-defined]
    return Function(part.file, part.node, penalty, kinds_of(kinds, part.file.path, name, lines))
