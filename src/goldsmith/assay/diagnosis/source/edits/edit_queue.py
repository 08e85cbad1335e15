"""EditQueue: the edits still to be tried, the cheapest first; places learn from the outcomes of their edits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from ..children.mutants import EditOutcome
from .edits import Edit

_DEAD = 4  # edits of a place that ran and moved no wrong result, until the others of the place wait for all the rest
_COSTLY = 1.9  # cost from which edits wait: a cheap one may choose the branch that is not taken
_BONUS = 0.7  # cost less for the edits of a place where one has mended a part
Place = tuple[str, int]


class EditQueue:
    """Iterates in batches. Call `learn` with every outcome."""

    def __init__(self, edits: Iterable[Edit]):
        self.left = deque(edits)
        self.waiting: deque[Edit] = deque()
        self.idle: Counter[Place] = Counter()
        self.moving: set[Place] = set()
        self.promising: set[Place] = set()

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

    def learn(self, edit: Edit, outcome: EditOutcome, better: bool) -> None:
        at = place(edit)
        if outcome.moved:
            self.moving.add(at)
        elif outcome.state in ("wrong", "right"):
            self.idle[at] += 1
        if better and at not in self.promising:
            self.promising.add(at)
            self.left = deque(sorted(self.left, key=lambda e: e.cost - _BONUS * (place(e) in self.promising)))


def place(edit: Edit) -> Place:
    return edit.path, edit.place
