"""All single edits of a candidate, the cheapest first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..reading.candidate_source import BACKWARD, FORWARD, Part
from ..reading.source_file import first_line
from ..reading.value_kinds import kinds_of
from .call_edits import call_edits
from .edits import Edit, Function, cheapest_first
from .scope_edits import scope_edits
from .small_edits import small_edits
from .statement_edits import statement_edits

_OTHER_PHASE = 1.5  # cost of an edit where only the right phase can see it


def all_edits(
    parts: Iterable[Part], wrong: Collection[str], kinds: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> list[Edit]:
    """Every single edit, the cheapest first; those in the phase that computes right results cost more.

    wrong: names of the wrong results
    """
    listed = list(parts)
    gradients = bool(wrong) and all(n.endswith(".grad") for n in wrong)
    phase = BACKWARD if gradients and any(p.phases == {BACKWARD} for p in listed) else FORWARD
    functions = [_function(p, 0.0 if phase in p.phases else _OTHER_PHASE, kinds) for p in listed]
    edits: list[Edit] = []
    for function in functions:
        edits += edits_of(function, [f for f in functions if f is not function])
    return cheapest_first(edits)


def edits_of(function: Function, beside: Sequence[Function] = ()) -> list[Edit]:
    """The edits of one function. beside: the others, whose expressions may belong here."""
    return [
        *small_edits(function),
        *call_edits(function),
        *statement_edits(function),
        *scope_edits(function, beside),
    ]


def _function(part: Part, penalty: float, kinds: Mapping[str, Mapping[str, str]]) -> Function:
    name = getattr(part.node, "name", "<lambda>")
    lines = range(first_line(part.node), part.node.lineno + 1)  # type: ignore[attr-defined]
    return Function(part.file, part.node, penalty, kinds_of(kinds, part.file.path, name, lines))
