"""EditQueue: the edits still to be tried, the cheapest first; places learn from the outcomes of their edits."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator

from ..children.mutants import EditOutcome
from .edits import Edit, Line, Place

_DEAD = 4  # edits of a place that ran and moved no wrong result, until the others of the place wait for all the rest
_COSTLY = 1.9  # cost from which edits wait: a cheap one may choose the branch that is not taken
_BONUS = 0.7  # cost less for the edits of a place where one has mended a part
_BROAD = 0.3  # cost more for the edits of a place that also moves right results
_PROBED = 1.9  # cost up to which an edit is tried early to see what its place moves
_FIRST, _CLOSE, _NEAR = 1.2, 0.6, 0.3  # cost less in a line that a trace names, within two lines of it, in its function
_LINES = 2
_BESIDE = 0.5  # cost more where a trace shows that all operations are right: so are those of one fault in five
_BEGIN = 0.5  # cost up to which edits of such lines come before all that probe places
_HINTED = 0.8  # cost less for a kind that undoes the edit of the golden that fits


class EditQueue:
    """Iterates in batches. Call `learn` with every outcome.

    near   edits that are there from the start; far: makes the others of some places, or with None of all that are left
    wrong  names of the wrong results
    first  lines to try before all others
    kinds  kinds of edits to try earlier
    around loops and conditions around such lines, nearly as early
    beside statements whose operations, as a trace shows, are right or lead to right results only
    """

    def __init__(
        self,
        near: Iterable[Edit],
        wrong: Collection[str] = (),
        first: Collection[Line] = (),
        kinds: Collection[str] = (),
        far: Callable[[Collection[Place] | None], list[Edit]] = lambda places: [],
        beside: Collection[Place] = (),
        around: Collection[Place] = (),
    ):
        self.wrong, self.lines, self.kinds, self.far = set(wrong), set(first), set(kinds), far
        self.beside, self.around = set(beside), set(around)
        self.waiting: deque[Edit] = deque()
        self.idle: Counter[Place] = Counter()
        self.moving: set[Place] = set()
        self.broad: set[Place] = set()
        self.promising: set[Place] = set()
        about = {(path, line + n) for path, line, _ in self.lines for n in range(-_LINES, _LINES + 1)}
        ordered = sorted([*near, *(far(about) if about else ())], key=self.cost)
        named = [e for e in ordered if self._distance(e) <= _LINES and self.cost(e) <= _BEGIN]
        known = {id(e) for e in named}
        probing = _one_for_each_place(e for e in ordered if id(e) not in known and place(e) not in self.beside)
        known |= {id(e) for e in probing}
        self.probes = len(named) + len(probing)
        self.left = deque([*named, *probing, *(e for e in ordered if id(e) not in known)])
        self.expansions = deque([lambda: self.promising | self.moving, lambda: None])

    def batches(self, size: int) -> Iterator[list[Edit]]:
        while self._refilled():
            batch: list[Edit] = []
            while self.left and len(batch) < size:
                edit = self.left.popleft()
                if edit.cost >= _COSTLY and self.idle[place(edit)] >= _DEAD and place(edit) not in self.moving:
                    self.waiting.append(edit)
                else:
                    batch.append(edit)
            if not self.left and not batch:
                batch = [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
            if batch:
                yield batch
            probing, self.probes = self.probes > 0, self.probes - len(batch)
            if probing and self.probes <= 0:
                self._sort()

    def _refilled(self) -> bool:
        """Whether edits are left: after the probes come those of the places that matter, and at the end all others."""
        while self.probes <= 0 and self.expansions and (len(self.expansions) > 1 or not self.left):
            places = self.expansions.popleft()()
            self.left += self.far(places) if places is None or places else []
            self._sort()
        return bool(self.left or self.waiting)

    def learn(self, edit: Edit, outcome: EditOutcome, better: bool) -> None:
        at = place(edit)
        if outcome.moved:
            self.moving.add(at)
        elif outcome.state in ("wrong", "right"):
            self.idle[at] += 1
        if outcome.state == "wrong" and self.wrong and set(outcome.changed) - self.wrong:
            self.broad.add(at)
        if better and at not in self.promising:
            self.promising.add(at)
            self._sort()

    def _sort(self) -> None:
        """Again by cost, once the edits that probe places are through."""
        if self.probes <= 0:
            self.left = deque(sorted(self.left, key=self.cost))

    def cost(self, edit: Edit) -> float:
        at = place(edit)
        cost = edit.cost - _BONUS * (at in self.promising) + _BROAD * (at in self.broad)
        distance = self._distance(edit)
        cost += _BESIDE * (at in self.beside and distance > _LINES) - _HINTED * (edit.kind in self.kinds)
        if self.lines:
            near = _NEAR * any(edit.function == f for _, _, f in self.lines)
            cost -= _FIRST if not distance else _CLOSE if distance <= _LINES or at in self.around else near
        return cost

    def _distance(self, edit: Edit) -> float:
        """Lines from an edit to the nearest line that a trace names."""
        apart = [
            min(abs(line - edit.line), abs(line - edit.place)) for path, line, _ in self.lines if path == edit.path
        ]
        return min(apart, default=math.inf)


def _one_for_each_place(edits: Iterable[Edit]) -> list[Edit]:
    """The cheapest edit of each place."""
    found: dict[Place, Edit] = {}
    for edit in edits:
        if edit.cost <= _PROBED:
            found.setdefault(place(edit), edit)
    return list(found.values())


def place(edit: Edit) -> Place:
    return edit.path, edit.place
