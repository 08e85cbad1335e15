"""Edits as data, as the search tries them: every named edit is one Change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from ..edits.golden_edit import EditedRun, NamedEdit
from ..graph.graph import followed
from ..graph.node import Changed, Key, Node
from .change import Change

# operators that copy a tensor or take rows of it
THROUGH = frozenset(
    "index_select index gather clone _to_copy contiguous masked_fill embedding tril triu detach alias".split()
)


def changes(edits: Iterable[NamedEdit | Change], nodes: Sequence[Node]) -> Iterator[Change]:
    """Of the edits, some concern only what the backward reads; copies of those tensors change with them."""
    for edit in edits:
        if isinstance(edit, Change) or not edit.edit.backward_only:
            yield edit if isinstance(edit, Change) else change_of(edit)
            continue

        def instead(tensors: Mapping[Key, Tensor], edit: NamedEdit = edit) -> Mapping[Key, Tensor]:
            return followed(nodes, EditedRun(edit.edit).saved(tensors), THROUGH)

        yield Change(edit.cause, edit.text, -1, None, edit.params, edit.prior, saved=instead, also=edit.also,
                     edit=edit.edit)  # fmt: skip


def change_of(edit: NamedEdit) -> Change:
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
                  scalars=dict(edit.edit.scalars), edit=edit.edit)  # fmt: skip


def _with_number(edit: NamedEdit, at: int) -> Callable[[float], Changed]:
    def with_number(c: float) -> Changed:
        return dict(EditedRun(edit.edit.with_number(c)).changes())[at]

    return with_number
