"""EditQueue: the edits still to be tried, the cheapest first; places learn from the outcomes of their edits."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from ..children.mutants import EditOutcome
from .edits import Edit, Line, Place
from .inverse_edits import NO_HINT, GoldenHint
from .repeated_edits import alike_edits

_DEAD = 4  # edits of a place that ran and moved no wrong result, until the others of the place wait for all the rest
_COSTLY = 1.9  # cost from which edits wait: a cheap one may choose the branch that is not taken
_WAITS = 100.0
_IDLE = 0.15  # cost more for each edit of a place that moved no wrong result
_BONUS = 0.7  # cost less for the edits of a place where one has mended a part
_BROAD, _PARTIAL = 1.0, 0.2  # cost more if a place also moves right results, or does not move every wrong one
_PROBED = 1.5  # cost up to which an edit is tried early to see what its place moves
_FIRST, _CLOSE, _NEAR = 1.2, 0.6, 0.3  # cost less in a line that a trace names, within two lines of it, in its function
_LINES = 2
_BESIDE = 0.2  # cost more where a trace shows that all operations are right: so are those of one fault in five
_BEGIN, _BEGUN = 0.5, 100  # cost up to which edits of such lines come before all that probe places; how many do
_FOLLOWED = 20  # edits that mend a part and are tried in other places too, at most
_RANK = 0.5  # cost more for the second, third, ... of one kind at one place, times the logarithm of its number
# cost more or less of a kind: how rarely an edit of it is the right one, where the right one stands at that place
# (second table of `python -m benchmarks.kernelfault.reach`, a third of its logarithm less the usual cost, damped,
# by 70 right edits of 49 faults of strangers)
_RARITY = {
    "term moved in": -1.0, "moved into the loop": -0.8, "moved out of the loop": -0.7, "limit added": -0.7,
    "moved out of the condition": -0.7, "statements exchanged": -0.5, "statement removed": -0.4, "call removed": -0.4,
    "dtype": -0.4, "another mask": -0.4, "arguments swapped": -0.4, "plus or minus one": -0.3, "comparator": -0.2,
    "a name for a number": -0.3, "like its twin": -0.2, "entries exchanged": -0.2, "term moved out": -0.2,
    "another expression": 0.2, "operator": 0.3, "call added": 0.4, "condition added": 0.3, "factor added": 0.4,
    "addend added": 0.5,
}  # fmt: skip
_HINTED = 0.8  # cost less for a kind that undoes the edit of the golden that fits
_READING = 0.6  # cost less where a name of the golden's edited line is read
_NAMED = 1.2  # cost less for an edit that brings in or out what the edit of the golden names


class EditQueue:
    """Iterates in batches. Call `learn` with every outcome.

    near   edits that are there from the start; far: makes the others of some places, or with None of all that are left
    wrong  names of the wrong results
    first  lines to try before all others
    kinds  kinds of edits to try earlier; named: names and numbers to bring in or out earlier
    around loops and conditions around such lines, nearly as early
    beside statements whose operations, as a trace shows, are right or lead to right results only
    reading statements that read what the golden reads in the line whose edit fits
    texts  path -> text, to make an edit that mends a part in other places too
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
        texts: Mapping[str, bytes] = MappingProxyType({}),
        named: GoldenHint = NO_HINT,
        reading: Collection[Place] = (),
    ):
        self.wrong, self.lines, self.kinds, self.far = set(wrong), set(first), set(kinds), far
        self.beside, self.around, self.reading = set(beside), set(around), set(reading)
        self.texts, self.named, self.better = texts, named, list[Edit]()
        self.idle: Counter[Place] = Counter()
        self.moved: dict[Place, set[str]] = {}  # names of results, of the places that move wrong ones
        self.promising: set[Place] = set()
        self.known: list[Edit] = []
        self.queues: dict[Place, deque[tuple[float, Edit]]] = {}
        about = {(path, line + n) for path, line, _ in self.lines for n in range(-_LINES, _LINES + 1)}
        self._add([*near, *(far(about) if about else ())])
        rows = (row for rows in self.queues.values() for row in rows)
        ordered = [e for _, e in sorted(rows, key=lambda row: row[0])]
        close = [e for e in ordered if self.lines and self._distance(e) <= _LINES and self._cost(e) <= _BEGIN]
        close = close[:_BEGUN]
        early = {id(e) for e in close}
        probing = _one_for_each_place(e for e in ordered if id(e) not in early and place(e) not in self.beside)
        early |= {id(e) for e in probing}
        self.ahead = deque([*close, *probing])
        self.queues = {at: deque(r for r in rows if id(r[1]) not in early) for at, rows in self.queues.items()}
        self.expanded: set[Place] | None = None  # places whose further edits are made; complete: of all places
        self.waiting: list[Edit] = []
        self.complete = False

    def batches(self, size: int) -> Iterator[list[Edit]]:
        while True:
            batch = [self.ahead.popleft() for _ in range(min(size, len(self.ahead)))]
            if not batch:
                self._expand()
                batch = list(self._cheapest(size))
            if not batch:
                return
            yield batch

    def _cheapest(self, size: int) -> Iterator[Edit]:
        costs = {at: self._place_cost(at) for at, rows in self.queues.items() if rows}
        dead = {at for at in costs if self.idle[at] >= _DEAD and at not in self.moved}
        for _ in range(size):
            heads = ((self.queues[at][0], at) for at in costs)
            best = min(
                ((cost + costs[at] + _WAITS * (at in dead and e.cost >= _COSTLY), at) for (cost, e), at in heads),
                default=None,
            )
            if best is None:
                return
            yield self.queues[best[1]].popleft()[1]
            if not self.queues[best[1]]:
                del costs[best[1]]

    def _expand(self) -> None:
        """Once the first ones are through come those of the places that matter, and at the end all others.

        Of a place that turns out to matter later come those first that bring in or out what the hint names.
        """
        matter = self.promising | set(self.moved)
        if self.expanded is None:
            self.expanded = matter
            self._bring_in(self.far(matter) if matter else [])
        elif self.named != NO_HINT and matter - self.expanded:
            edits = self.far(matter - self.expanded)
            self.expanded |= matter
            self._bring_in(e for e in edits if self._fits(e))
            self.waiting += [e for e in edits if not self._fits(e)]
        if not self.complete and not any(self.queues.values()):
            self.complete = True
            self._bring_in([*self.waiting, *self.far(None)])

    def _bring_in(self, edits: Iterable[Edit]) -> None:
        further = list(edits)
        self._add(further)
        for edit in self.better:
            self._follow(edit, further)

    def _add(self, edits: Iterable[Edit]) -> None:
        found: dict[Place, list[tuple[float, Edit]]] = {}
        for edit in edits:
            self.known.append(edit)
            found.setdefault(place(edit), []).append((self._cost(edit), edit))
        for at, rows in found.items():
            ranked = [*self.queues.get(at, ()), *_ranked(rows)]
            self.queues[at] = deque(sorted(ranked, key=lambda row: row[0]))

    def learn(self, edit: Edit, outcome: EditOutcome, better: bool) -> None:
        at = place(edit)
        if outcome.moved:
            self.moved.setdefault(at, set()).update(outcome.changed)
        elif outcome.state in ("wrong", "right"):
            self.idle[at] += 1
        if better:
            self.promising.add(at)
        if better and not edit.joins and len(self.better) < _FOLLOWED:
            self.better.append(edit)
            self._follow(edit, self.known)

    def _follow(self, edit: Edit, edits: Iterable[Edit]) -> None:
        """The same change elsewhere as well comes next."""
        data = self.texts.get(edit.path)
        self.ahead.extendleft(reversed([] if data is None else list(alike_edits(edit, edits, data))))

    def _place_cost(self, at: Place) -> float:
        """What the outcomes of the edits of a place say about the others."""
        cost = -_BONUS * (at in self.promising)
        moved = self.moved.get(at)
        if moved is None:
            return cost + _IDLE * min(_DEAD, self.idle[at])
        outputs = {n for n in self.wrong if not n.endswith(".grad")}
        if outputs:  # then the gradients were not computed
            moved = {n for n in moved if not n.endswith(".grad")}
        return cost + _BROAD * bool(moved - self.wrong) + _PARTIAL * bool(moved and (outputs or self.wrong) - moved)

    def _cost(self, edit: Edit) -> float:
        """The cost by what is known before any edit is tried."""
        at, distance = place(edit), self._distance(edit)
        cost = edit.cost + _RARITY.get(edit.kind, 0.0) - _HINTED * (edit.kind in self.kinds)
        cost += _BESIDE * (at in self.beside and distance > _LINES)
        cost -= _NAMED * self._fits(edit) + _READING * (at in self.reading)
        if self.lines:
            near = _NEAR * any(edit.function == f for _, _, f in self.lines)
            cost -= _FIRST if not distance else _CLOSE if distance <= _LINES or at in self.around else near
        return cost

    def _fits(self, edit: Edit) -> float:
        return self.named.fits(edit, self.texts.get(edit.path, b""))

    def _distance(self, edit: Edit) -> float:
        """Lines from an edit to the nearest line that a trace names."""
        apart = [
            min(abs(line - edit.line), abs(line - edit.place)) for path, line, _ in self.lines if path == edit.path
        ]
        return min(apart, default=math.inf)


def _ranked(rows: Iterable[tuple[float, Edit]]) -> Iterator[tuple[float, Edit]]:
    """The edits of one place, of which the first of each kind come earlier."""
    counts: Counter[str] = Counter()
    for cost, edit in sorted(rows, key=lambda row: row[0]):
        counts[edit.kind] += 1
        yield cost + _RANK * math.log(counts[edit.kind]), edit


def _one_for_each_place(edits: Iterable[Edit]) -> list[Edit]:
    """The cheapest edit of each place."""
    found: dict[Place, Edit] = {}
    for edit in edits:
        if edit.cost <= _PROBED:
            found.setdefault(place(edit), edit)
    return list(found.values())


def place(edit: Edit) -> Place:
    return edit.path, edit.place
