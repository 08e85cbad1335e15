"""ChangedGolden: the golden behind one wrong tensor, its recorded operators, and runs of it with a change."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...execute.records import CandidateRun
from ...judge.examination import Examination
from ..edits.golden_edit import EditedRun, NamedEdit
from ..edits.saved import THROUGH
from ..facts.numbers import known
from ..graph.golden import Golden
from ..graph.graph import followed
from ..graph.node import Changed, Instead, Key, Node, behind, compared
from ..graph.recording import Listening
from ..graph.replay import Replay, Unknown, taped
from . import composed_slices
from .judge import EXPLAINED, Judge
from .vanishing import vanishing
from .witness import Operators, Witness, called, few, operators


class ChangedGolden:
    """What the golden makes of one wrong tensor with changes, on the case and on other draws.

    behind     the operators that the wrong tensor depends on; operators: their names
    alike      the expression of another tensor of the golden that equals the wrong one
    left_out   kinds of changes that could not be offered for this golden -> the error
    """

    def __init__(
        self, examination: Examination, tensor: str, judge: Judge, own: CandidateRun, causes: frozenset[str] | None
    ):
        self.examination, self.tensor, self.judge, self.own = examination, tensor, judge, own
        self.causes = causes
        self.left_out: dict[str, str] = {}
        self.golden = Golden(examination.ref, opened=not tensor.endswith(".grad"))
        self.leaves = examination.ref.leaves
        material = examination.material
        self.numbers = known(material.scalars, material.sizes, material.inputs)
        mode = Listening().record()
        value = self.golden.run_under(mode, self.leaves, tensor).get(tensor)
        calls = self.nodes = mode.calls or []
        key = -1 if value is None else mode.key_of(value)
        self.behind = set(range(len(calls))) if key == -1 else behind(calls, key)
        self.operators = frozenset(call.name for call in calls if call.index in self.behind)
        self.vanishing = vanishing(calls, self.behind)  # operators whose result is 0 for every input
        self.before_vanishing = {i for at in self.vanishing for i in behind(calls, at)}
        self._compared = compared(calls, self.behind)  # operators whose results are compared: a choice depends on them
        others = [c for c in calls if isinstance(c.out, Tensor) and c.index != key]
        self.alike = next((c.expression for c in others if judge.explained(c.out.detach())[1]), "")

    def allows(self, change: NamedEdit) -> bool:
        return self.causes is None or change.cause in self.causes or change.free is not None

    def reaches(self, call: Node) -> bool:
        """Whether NaN in the operator's result reaches every wrong element."""

        def poisoned(func: Any, args: tuple, kwargs: dict) -> Any:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.is_floating_point():
                return out.fill_(torch.nan) if func._schema.is_mutable else torch.full_like(out, torch.nan)
            return out

        if not isinstance(call.out, Tensor) or not call.out.is_floating_point():
            return True
        value = (self.values_after({call.index: poisoned}, self.tensor) or {}).get(self.tensor)
        if value is None or bool((torch.isnan(value) | ~self.judge.wrong_at).all()):
            return True
        return (
            call.index in self._compared
        )  # a comparison with NaN is false and selects a number, so NaN may not arrive

    @cached_property
    def replay(self) -> Replay | None:
        """The recorded run up to the tensor, to recompute only what a change affects; None if it cannot be recorded."""
        with suppress(RuntimeError, NotImplementedError):  # storage of another kind
            return taped(lambda tape: self.golden.run_under(tape, self.leaves, self.tensor), self.tensor)
        return None

    def values_after(
        self, changes: Mapping[int, Changed], until: str, leaves: Mapping[str, Tensor] | None = None, wrap: str = "",
        saved: Instead | None = None, golden: Golden | None = None, scalars: Mapping[str, Any] | None = None,
        sure: bool = False,
    ) -> dict[str, Tensor] | None:  # fmt: skip
        """The golden's tensors up to `until` with these operators changed, or None if it raises.

        sure: run the whole golden, even if a replay of the recorded run is possible.
        """
        leaves, golden = self.leaves if leaves is None else leaves, golden or self.golden
        own = golden is self.golden and until == self.tensor and not (wrap or scalars or sure)
        try:
            if own and self.replay is not None:
                with suppress(Unknown):
                    other = {n: t for n, t in leaves.items() if t is not self.leaves.get(n)}
                    return {until: self.replay.value(changes, other, saved)}
            return golden.run_under(Listening(dict(changes), wrap=wrap, saved=saved), leaves, until, scalars)
        except Exception:  # noqa: BLE001 - for example shapes that do not fit
            return None

    def run_changed(
        self, change: NamedEdit, until: str, draw: Witness | None = None, *, sure: bool = False
    ) -> dict[str, Tensor] | None:
        leaves, golden = (self.leaves, self.golden) if draw is None else (draw.leaves, draw.golden)
        run, edit = EditedRun(change.edit), change.edit
        try:
            leaves = {**leaves, **run.inputs(leaves)} if run.needs_inputs and not edit.backward_only else leaves
        except (RuntimeError, ZeroDivisionError):  # for example numbers that the input's dtype cannot hold
            return None
        if change.composed is not None:
            return composed_slices.composed_values(
                change, leaves, lambda other: self.values_after({}, until, other, golden=golden, sure=sure), until
            )
        if edit.backward_only:
            return self.values_after({}, until, leaves, saved=partial(self._saved, run), golden=golden, sure=sure)
        changes = dict(run.changes())
        return self.values_after(changes, until, leaves, edit.wrap, change.saved, golden, dict(edit.scalars), sure)

    def value(self, change: NamedEdit, *, sure: bool = False) -> Tensor | None:
        """The wrong tensor with a change of the golden; None if that cannot run."""
        return (self.run_changed(change, self.tensor, sure=sure) or {}).get(self.tensor)

    def _saved(self, run: EditedRun, tensors: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        """What the backward reads instead; copies of the edited tensors change with them."""
        return followed(self.nodes, run.saved(tensors), THROUGH)

    @cached_property
    def witnesses(self) -> list[Witness]:
        return called(self.examination, self.tensor, self.own, self.judge)

    def explains_other_draws(self, change: NamedEdit) -> bool:
        """Whether the change also explains the candidate's results for other draws of the case."""
        for draw in self.witnesses:
            if change.redone is not None:
                mode = Listening().record()
                draw.golden.run_under(mode, draw.leaves, self.tensor)
                again = change.redone(mode.calls or [], draw.judge)
                if draw.judge.error and all(c.cause != change.cause for c in again):
                    return False
                continue
            share, exact = draw.judge.explained((self.run_changed(change, self.tensor, draw) or {}).get(self.tensor))
            if share < EXPLAINED and not exact:
                return False
        return True

    @cached_property
    def all_operators(self) -> Operators:
        """All operators of the golden in order, forward and backward."""
        return operators(self.golden, self.leaves)

    def explains_another_draw(self, change: NamedEdit) -> bool:
        """Whether a change that explains one draw also explains another; True if this cannot be tested.

        It can be tested only if the golden calls the same operators on both draws, because a change names an operator
        by its index.
        """
        if few(self.judge) or change.redone is not None or change.composed is not None or change.of_this_draw:
            return True
        alike = [draw for draw in self.witnesses if draw.operators == self.all_operators]
        return not alike or self.explains_other_draws(change)
