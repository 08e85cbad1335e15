"""Change: one modification of the golden to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..edits.golden_edit import GoldenEdit
from ..graph.node import Changed, Instead
from ..graph.recording import writes


@dataclass(frozen=True)
class Change:
    """One change of the golden to try.

    at       index of the operator; -1: the golden's leaves are changed instead
    change   (func, args, kwargs) -> the operator's new result; with `free`, a number comes first, and the best fit for
             it is searched, starting from `free`
    leaves   for at = -1: inputs and output gradients -> their replacements
    prior    how common the mistake is; of two changes that explain the same, the higher prior comes first
    wrap     "around" or "clamp": how indices out of range are treated (the golden's own are never out of range)
    group    (index, change) of several operators that change alike, in place of `change`; a free number comes first
    saved    all forward tensors -> replacements for those that the backward reads
    also     other causes that the same mistake may be called by, the likeliest first
    scalars  for at = -1: name of a scalar -> its replacement
    composed for at = -1: (leaves, a function that runs the golden on other leaves) -> results assembled from its runs
    drawn    the change was derived from the candidate's numbers, so it holds for this draw only
    edit     the change as data; None: its kind is not yet among `edits`
    kind     the kind that offered it, as the tables of `offers` call it
    redone   for a `drawn` change: finds the same kind of change from the numbers of another draw
    """

    cause: str
    text: str
    at: int
    change: Callable[..., Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    prior: float = 0.5
    free: float | None = None
    leaves: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    wrap: str = ""
    group: tuple[tuple[int, Callable[..., Any]], ...] = ()
    saved: Instead | None = None
    also: tuple[str, ...] = ()
    scalars: Mapping[str, object] = field(default_factory=dict)
    composed: Callable[..., Mapping[str, Tensor]] | None = None
    drawn: bool = False
    redone: Callable[..., Iterable[Change]] | None = None
    edit: GoldenEdit | None = None
    kind: str = ""

    @property
    def all(self) -> tuple[tuple[int, Callable[..., Any]], ...]:
        """Index and change of every operator that it changes."""
        return self.group or (((self.at, self.change),) if self.change is not None else ())

    @property
    def only_operator(self) -> int:
        """Index of the operator if it changes only one, otherwise -1."""
        if self.edit is None:
            return -1 if self.group else self.at
        places = {action.at for action in self.edit.actions}
        at = next(iter(places)) if len(places) == 1 and not self.edit.backward_only else -1
        return at if isinstance(at, int) else -1


def with_result(change: Callable[..., Tensor]) -> Changed:
    """A change that replaces the operator's result y by change(y)."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        new = change(out)
        return out.copy_(new) if writes(func) else new

    return run


def instead(make: Callable[..., Tensor]) -> Changed:
    """Another function of the same arguments; written in place if the operator is in place."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        if writes(func):
            return args[0].copy_(make(args[0].clone(), *args[1:], **kwargs))
        return make(*args, **kwargs)

    return run
