"""EditQueue: the edits still to be tried, the cheapest first; places learn from the outcomes of their edits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from ..children.mutants import EditOutcome
from .edits import Edit

_DEAD = 4  # edits of a place that ran and moved no wrong result, until the others of the place wait for all the rest
_COSTLY = 1.9  # cost from which edits wait: a cheap one may choose the branch that is not taken
_BONUS = 0.7  # cost less for the edits of a place where one has mended a part
_BROAD = 0.3  # cost more for the edits of a place that also moves right results
_PROBED = 1.9  # cost up to which an edit is tried early to see what its place moves
_FIRST, _NEAR = 3.0, 0.3  # cost less in a line that a trace names, and in its function
_HINTED = 0.5  # cost less for a kind that undoes the edit of the golden that fits
Place = tuple[str, int]
Line = tuple[str, int, str]  # file, line, function


class EditQueue:
    """Iterates in batches. Call `learn` with every outcome.

    wrong  names of the wrong results
    first  lines to try before all others
    kinds  kinds of edits to try earlier
    """

    def __init__(
        self,
        edits: Iterable[Edit],
        wrong: Collection[str] = (),
        first: Collection[Line] = (),
        kinds: Collection[str] = (),
    ):
        self.wrong, self.lines, self.kinds = set(wrong), set(first), set(kinds)
        self.waiting: deque[Edit] = deque()
        self.idle: Counter[Place] = Counter()
        self.moving: set[Place] = set()
        self.broad: set[Place] = set()
        self.promising: set[Place] = set()
        ordered = sorted(edits, key=self.cost)
        named = [e for e in ordered if self._named(e)]
        probing = _one_for_each_place(e for e in ordered if not self._named(e))
        early = {id(e) for e in (*named, *probing)}
        self.probes = len(named) + len(probing)
        self.left = deque([*named, *probing, *(e for e in ordered if id(e) not in early)])

    def batches(self, size: int) -> Iterator[list[Edit]]:
        while self.left or self.waiting:
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
        cost -= _HINTED * (edit.kind in self.kinds)
        if self.lines:
            cost -= _FIRST if self._named(edit) else _NEAR * any(edit.function == f for _, _, f in self.lines)
        return cost

    def _named(self, edit: Edit) -> bool:
        return any(edit.path == path and line in (edit.line, edit.place) for path, line, _ in self.lines)


def _one_for_each_place(edits: Iterable[Edit]) -> list[Edit]:
    """The cheapest edit of each place."""
    found: dict[Place, Edit] = {}
    for edit in edits:
        if edit.cost <= _PROBED:
            found.setdefault(place(edit), edit)
    return list(found.values())


def place(edit: Edit) -> Place:
    return edit.path, edit.place
