"""Edits as data, as the search tries them: every named edit is one Change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..edits.golden_edit import EditedRun, NamedEdit
from ..graph.node import Changed
from .change import Change


def changes(edits: Iterable[NamedEdit]) -> Iterator[Change]:
    yield from map(_change, edits)


def _change(edit: NamedEdit) -> Change:
    run = EditedRun(edit.edit)
    places = run.changes()
    leaves = run.inputs if run.needs_inputs else None
    if edit.free is not None:
        made = {at: _with_number(edit, at) for at, _ in places}
        return Change(edit.cause, edit.text, places[0][0], made[places[0][0]], edit.params, edit.prior, free=edit.free,
                      group=tuple(made.items()) if len(made) > 1 else (), also=edit.also, edit=edit.edit)  # fmt: skip
    at, change = places[0] if places else (-1, None)
    return Change(edit.cause, edit.text, at, change, edit.params, edit.prior, leaves=leaves,
                  group=places if len(places) > 1 else (), also=edit.also, wrap=edit.edit.wrap,
                  edit=edit.edit)  # fmt: skip


def _with_number(edit: NamedEdit, at: int) -> Callable[[float], Changed]:
    def with_number(c: float) -> Changed:
        return dict(EditedRun(edit.edit.with_number(c)).changes())[at]

    return with_number
