"""FurtherEdits: the edits of a source that can be made beside one that is made already."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ..cpp.cpp_edits import CppEdits
from .edits import Edit, Line, Place
from .every_edit import EveryEdit


class FurtherEdits:
    """Each edit with the first one; the same interface as all edits of a source, of which some are listed already."""

    def __init__(self, edits: EveryEdit | CppEdits | FurtherEdits, listed: Iterable[Edit], first: Edit):
        self.edits, self.first = edits, first
        self.near = self._joined(listed)

    def far(self, places: Collection[Place] | None = None) -> list[Edit]:
        return self._joined(self.edits.far(places))

    def around(self, lines: Collection[Line]) -> set[Place]:
        return self.edits.around(lines)

    @property
    def branches(self) -> set[Place]:
        return self.edits.branches

    def reading(self, words: Collection[str]) -> set[Place]:
        return self.edits.reading(words)

    def places(self, lines: Collection[tuple[str, int]]) -> set[Place]:
        return self.edits.places(lines)

    def _joined(self, edits: Iterable[Edit]) -> list[Edit]:
        fitting = [e for e in edits if e.path == self.first.path and not e.overlaps(self.first)]
        both = (self.first.joined(e) for e in fitting)
        return [replace(e, spans=b.spans, joins=b.joins) for e, b in zip(fitting, both, strict=True)]
