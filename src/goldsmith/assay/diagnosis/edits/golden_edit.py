"""GoldenEdit: selectors with primitives, as data; NamedEdit: an edit with its cause and the sentence that tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..graph.node import Changed, Instead, Key, Node, Observed
from ..graph.recording import writes
from ..graph.tensors import replaced

RESULT, CALL = "result", "call"
Part = int | str | tuple[int, int]
Source = Key | tuple[int, int]


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in the current run, for primitives that replace the whole call."""

    func: Any
    args: tuple
    kwargs: Mapping[str, Any]

    @property
    def x(self) -> Tensor:
        return self.args[0]

    @property
    def name(self) -> str:
        return self.func._schema.name.split("::")[1]

    def on(self, *args: object) -> Tensor:
        return self.func(*args, **self.kwargs)


@dataclass(frozen=True)
class Primitive:
    """A function from `primitives` with its settings; called with an operand, a result, or a OperatorCall."""

    of: Callable[..., Any]
    settings: tuple[tuple[str, object], ...] = ()

    def __call__(self, value: object, **tensors: Tensor) -> Any:
        return self.of(value, **dict(self.settings), **tensors)


def do(of: Callable[..., Any], /, **settings: object) -> Primitive:
    return Primitive(of, tuple(settings.items()))


@dataclass(frozen=True)
class Action:
    """A primitive at one place.

    at    index of the operator, or name of the input
    part  RESULT, CALL, the position of an operand, or (position, item) for an operand in a list
    reads other tensors of the same run that the primitive gets, by argument: an input or an operator's result by its
          key, or an operand as (operator, position)
    """

    at: int | str
    part: Part
    primitive: Primitive
    reads: tuple[tuple[str, Source], ...] = ()


@dataclass(frozen=True)
class GoldenEdit:
    """The actions of one edit, and the golden's source line that the first of them belongs to.

    backward_only  the backward reads the edited input; the forward reads the golden's
    wrap           "around" or "clamp": how indices out of range are read (the golden's own are never out of range)
    scalars        other values of scalars of the case
    """

    actions: tuple[Action, ...]
    line: str = ""
    backward_only: bool = False
    wrap: str = ""
    scalars: tuple[tuple[str, object], ...] = ()

    def with_number(self, c: float) -> GoldenEdit:
        """The edit with its free number, the setting `c` of its primitives."""
        actions = []
        for action in self.actions:
            settings = dict(action.primitive.settings)
            new = do(action.primitive.of, **settings | {"c": c}) if "c" in settings else action.primitive
            actions.append(replace(action, primitive=new))
        return replace(self, actions=tuple(actions))


class EditedRun:
    """One edit as a run needs it: other functions for its operators, and other inputs."""

    def __init__(self, edit: GoldenEdit):
        self.edit = edit
        self.now: dict[Source, Any] = {}  # tensors of the current run that the edit reads elsewhere
        self.needs_inputs = any(isinstance(a.at, str) or any(isinstance(k, str) for _, k in a.reads)
                                for a in edit.actions)  # fmt: skip

    def changes(self) -> tuple[tuple[int, Changed], ...]:
        """What the edited operators do instead, by index."""
        read: dict[int, set[Source]] = {}
        for source in (source for action in self.edit.actions for _, source in action.reads):
            if not isinstance(source, str):
                read.setdefault(source[0] if isinstance(source, tuple) else source, set()).add(source)
        places: dict[int, list[Action]] = {at: [] for at in sorted(read)}
        for action in self.edit.actions:
            if isinstance(action.at, int):
                places.setdefault(action.at, []).append(action)
        return tuple((at, self._changed(actions, read.get(at, set()))) for at, actions in places.items())

    def inputs(self, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The edited inputs."""
        self.now.update(now)
        new: dict[str, Tensor] = {}
        for action in self.edit.actions:
            if isinstance(action.at, str):
                new[action.at] = self._applied(action, new.get(action.at, now[action.at]))
        return new

    def saved(self, tensors: Mapping[Key, Tensor]) -> dict[Source, Tensor]:
        """What the backward reads instead, of the forward's tensors by key; {} if one of them is missing.

        An operand, by (operator, position), is what that operator alone reads when it is computed again.
        """
        wanted = {key for a in self.edit.actions for key in (a.at, *(k for _, k in a.reads))}
        if not wanted.issubset(tensors):
            return {}
        self.now.update({key: tensors[key] for _, key in (r for a in self.edit.actions for r in a.reads)})  # type: ignore[index]
        return {
            a.at if not isinstance(a.part, int) else (int(a.at), a.part): self._applied(a, tensors[a.at])
            for a in self.edit.actions
        }

    def _applied(self, action: Action, value: object) -> Any:
        return action.primitive(value, **{name: self.now[key] for name, key in action.reads})

    def _changed(self, actions: list[Action], read: set[Source]) -> Changed:
        """Edits the operands, then the call, then its result. Tensors in `read` are kept."""
        calls = [a for a in actions if a.part == CALL]
        results = [a for a in actions if a.part == RESULT]
        operands = [a for a in actions if a.part not in (CALL, RESULT)]

        def run(func: Any, args: tuple, kwargs: dict) -> Any:
            for action in operands:
                args = self._with_operand(args, action)
            self.now.update({source: args[source[1]] for source in read if isinstance(source, tuple)})
            if not calls:
                out = func(*args, **kwargs)
            elif writes(func):
                out = args[0].copy_(self._applied(calls[0], OperatorCall(func, (args[0].clone(), *args[1:]), kwargs)))
            else:
                out = self._applied(calls[0], OperatorCall(func, args, kwargs))
            for action in results if isinstance(out, Tensor) else ():
                new = self._applied(action, out)
                out = out.copy_(new) if writes(func) else new
            self.now.update({source: out for source in read if not isinstance(source, tuple)})
            return out

        return Observed(run) if read else run

    def _with_operand(self, args: tuple, action: Action) -> tuple:
        if isinstance(action.part, tuple):
            i, item = action.part
            return replaced(args, i, [self._applied(action, a) if j == item else a for j, a in enumerate(args[i])])
        i = int(action.part)
        return replaced(args, i, self._applied(action, args[i]))


@dataclass(frozen=True)
class NamedEdit:
    """An edit, its cause, and a sentence.

    prior     how common the mistake is: of two edits that explain the same, the higher prior comes first
    also      other causes that the same mistake may be called by, the likeliest first
    free      where the search for the edit's number begins; None: it has none
    kind      the table row of `offers` that it comes from
    saved     all forward tensors -> replacements for those that the backward reads
    composed  (inputs, a function that runs the golden on other inputs, the last wanted result) -> results assembled
              from its runs
    redone    for an edit that holds for this draw only, because it was derived from the candidate's numbers: finds the
              same kind of edit from the numbers of another draw
    """

    cause: str
    text: str
    edit: GoldenEdit
    prior: float
    params: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    free: float | None = None
    kind: str = ""
    saved: Instead | None = None
    composed: Callable[..., Mapping[str, Tensor]] | None = None
    redone: Callable[..., Iterable[NamedEdit]] | None = None

    @property
    def places(self) -> set[int]:
        """Indices of the operators that it edits."""
        return {a.at for a in self.edit.actions if isinstance(a.at, int) and not self.edit.backward_only}

    @property
    def only_operator(self) -> int:
        """Index of the operator if it edits nothing else, otherwise -1."""
        at = {a.at for a in self.edit.actions}
        return next(iter(self.places)) if len(at) == len(self.places) == 1 and self.saved is None else -1

    @property
    def of_this_draw(self) -> bool:
        """Whether it contains numbers of the draw that it was offered for, so that it holds for no other draw."""
        settings = [value for action in self.edit.actions for _, value in action.primitive.settings]
        return self.saved is not None or any(isinstance(v, Tensor) and v.numel() > 1 for v in settings)

    def acting(self, *actions: Action) -> NamedEdit:
        """With these actions in place of its own."""
        return replace(self, edit=replace(self.edit, actions=actions))


def named(
    node: Node, cause: str, prior: float, text: str, *actions: tuple[Part, Primitive], also: tuple[str, ...] = (),
    free: float | None = None, **params: Any,
) -> NamedEdit:  # fmt: skip
    """An edit of one operator."""
    edit = GoldenEdit(tuple(Action(node.index, part, primitive) for part, primitive in actions), node.line)
    return NamedEdit(cause, text, edit, prior, params, also, free)


def of_inputs(
    names: tuple[str, ...], cause: str, prior: float, text: str, primitive: Primitive, also: tuple[str, ...] = (),
    **params: Any,
) -> NamedEdit:  # fmt: skip
    """The same edit of several inputs."""
    actions = tuple(Action(name, RESULT, primitive) for name in names)
    return NamedEdit(cause, text, GoldenEdit(actions), prior, params, also)
