"""OperatorCall (one recorded operator), Change (one modification to try), and Listening (the mode for both)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....support.dispatch_mode import DispatchMode

Key = str | int  # a leaf's name, or the index of the operator that made a tensor
Instead = Callable[[Mapping[Key, Tensor]], Mapping[Key, Tensor]]
Changed = Callable[[Any, tuple, dict], Any]  # (func, args, kwargs) -> what the operator returns instead


@dataclass
class OperatorCall:
    """One operator of the golden's run, with its operands and their names."""

    index: int
    name: str
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    operands: tuple[str, ...]  # names of the tensors among args, in order
    backward: bool
    makers: tuple[Key, ...] = ()  # keys of those tensors
    line: str = ""  # source line in the golden; in autograd's backward, the line of the forward operator
    func: Any = None
    owns: bool = False  # whether its result has memory of its own
    read: tuple[Key, ...] = ()  # keys of all tensors it reads, including those in lists

    @property
    def tensors(self) -> list[Tensor]:
        return [a for a in self.args if isinstance(a, Tensor)]

    @property
    def expression(self) -> str:
        """A readable expression: `x * inv_rms`, `sum(x)`"""
        return _expression(self.name, self.operands, self.args)

    def operand(self, i: int) -> str:
        """The name of the i-th argument, or its value if it is not a tensor."""
        at = sum(isinstance(a, Tensor) for a in self.args[:i])
        return self.operands[at] if i < len(self.args) and isinstance(self.args[i], Tensor) else str(self.args[i])


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

    @property
    def all(self) -> tuple[tuple[int, Callable[..., Any]], ...]:
        """Index and change of every operator that it changes."""
        return self.group or (((self.at, self.change),) if self.change is not None else ())


class Listening(DispatchMode):
    """Counts the operators of a run, records them on request, and changes some."""

    def __init__(self, changes: Mapping[int, Changed] | None = None, *, wrap: str = "", saved: Instead | None = None):
        super().__init__()
        self.changes, self.wrap, self.saved = dict(changes or {}), wrap, saved
        self.count = 0
        self.backward = False
        self.calls: list[OperatorCall] | None = None
        self.names: dict[int, str] = {}  # storage -> name
        self.keys: dict[int, Key] = {}  # storage -> key of its maker
        self.forward_tensors: dict[Key, Tensor] = {}
        self.others: Mapping[Key, Tensor] | None = None  # replacements for what the backward reads
        self.alive: list[object] = []  # keeps storages alive, so that no address is reused
        self.lines: dict[int, str] = {}  # autograd's sequence number of an operator -> its line

    def record(self) -> Listening:
        self.calls = []
        return self

    @property
    def follows(self) -> bool:
        return self.calls is not None or self.saved is not None

    def call_it(self, tensor: Tensor, name: str, *, leaf: bool = False) -> None:
        """Names the storage of a tensor."""
        if self.follows and tensor.numel():
            place = tensor.untyped_storage().data_ptr()
            self.names[place] = name
            self.alive.append(tensor)
            if leaf:
                self.keys[place], self.forward_tensors[name] = name, tensor.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        if self.wrap:
            args = _within(func, args, self.wrap)
        if self.saved is not None and self.backward:
            args = tuple(self._instead(a) for a in args)
        change = self.changes.get(index)
        if not self.follows:
            out = func(*args, **kwargs) if change is None else change(func, args, kwargs)
            # as when recording: torch detaches a factory's result if something else still holds it
            self.alive.append(out)
            return out
        before = tuple(a.clone() if isinstance(a, Tensor) else a for a in args) if _writes(func) else args
        out = func(*args, **kwargs) if change is None else change(func, args, kwargs)
        self._followed(func, index, before, args, kwargs, out)
        return out

    def _instead(self, a: object) -> object:
        if self.others is None and self.saved is not None:
            self.others = self.saved(self.forward_tensors)
        if not isinstance(a, Tensor) or not a.numel():
            return a
        new = (self.others or {}).get(self.keys.get(a.untyped_storage().data_ptr(), -1))
        seen = None if new is None or not floating(a) else seen_through(new, a)
        return a if seen is None else seen

    def _followed(self, func: Any, index: int, before: tuple, args: tuple, kwargs: dict, out: Any) -> None:
        name = func._schema.name.split("::")[1]
        operands = tuple(self._name(a) for a in args if isinstance(a, Tensor))
        if self.calls is not None:
            makers = tuple(self.key_of(a) for a in args if isinstance(a, Tensor))
            owns = isinstance(out, Tensor) and self.key_of(out) == -1
            read = tuple(self.key_of(a) for a in _inside_of((args, kwargs)))
            line = self._line()
            call = OperatorCall(
                index, name, before, kwargs, out, operands, self.backward, makers, line, func, owns, read
            )
            self.calls.append(call)
        self.alive.append((args, out))
        for part in out if isinstance(out, list | tuple) else ():
            if isinstance(part, Tensor) and part.numel():
                self.keys.setdefault(part.untyped_storage().data_ptr(), index)
        if isinstance(out, Tensor) and out.numel():
            place = out.untyped_storage().data_ptr()
            if place not in self.keys:
                self.keys[place] = index
                if not self.backward:
                    self.forward_tensors[index] = out  # no operator may run here: it would be counted
            self.names.setdefault(place, _expression(name, operands, args))

    def _line(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.lines.get(node._sequence_nr(), "")
        line = _line()
        # of the autograd node that was created for this operator
        self.lines[torch.autograd._get_sequence_nr() - 1] = line
        return line

    def _name(self, tensor: Tensor) -> str:
        return self.names.get(tensor.untyped_storage().data_ptr(), "") if tensor.numel() else ""

    def key_of(self, tensor: Tensor) -> Key:
        return self.keys.get(tensor.untyped_storage().data_ptr(), -1) if tensor.numel() else -1


def _inside_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _inside_of(v)] if isinstance(value, list | tuple) else []


def behind(calls: Sequence[OperatorCall], key: Key) -> set[int]:
    """Indices of all operators that the tensor with this key depends on."""
    written: dict[Key, list[OperatorCall]] = {}
    for call in calls:
        outs = call.out if isinstance(call.out, list | tuple) else (call.out,)
        writes = not call.owns and any(isinstance(o, Tensor) for o in outs)
        for k in call.makers[:1] if writes else ():
            written.setdefault(k, []).append(call)  # writes in place, or makes a view that may be written to
    operators: set[int] = set()
    waiting, known = [key], {key}
    while waiting:
        at = waiting.pop()
        makers = written.get(at, []) + ([calls[at]] if isinstance(at, int) and 0 <= at < len(calls) else [])
        for call in makers:
            operators.add(call.index)
            for k in call.read:
                if k not in known:
                    known.add(k)
                    waiting.append(k)
    return operators


def compared(calls: Sequence[OperatorCall], among: set[int]) -> set[int]:
    """The operators in `among` that compare numbers, and those that their operands depend on."""
    operators: set[int] = set()
    for call in calls:
        asks = isinstance(call.out, Tensor) and call.out.dtype == torch.bool and any(map(floating, call.tensors))
        if asks and call.index in among and call.index not in operators:
            operators |= behind(calls, call.index)
    return operators & among


def read_back(calls: Sequence[OperatorCall], among: set[int]) -> set[Key]:
    """Keys of the tensors that the backward operators in `among` read."""
    return {key for call in calls if call.backward and call.index in among for key in call.makers}


_SIGNS = {"mul": "*", "div": "/", "add": "+", "sub": "-", "mm": "@", "bmm": "@"}
_LONG = 36


def _expression(name: str, operands: tuple[str, ...], args: tuple) -> str:
    """A short expression: `x * inv_rms`, `sum(...)`."""
    parts = list(operands)
    if len(args) > 1 and len(parts) == 1 and isinstance(args[1], int | float) and name in _SIGNS:
        parts.append(f"{args[1]:g}")
    sign = _SIGNS.get(name.rstrip("_"))
    if sign and len(parts) == 2:
        text = f" {sign} ".join(f"({p})" if " " in p and not p.endswith(")") else p for p in parts)
    else:
        text = f"{name.strip('_')}({', '.join(p for p in parts if p)})"
    return text if len(text) <= _LONG else f"{name.strip('_')}(...)"


def _within(func: Any, args: tuple, how: str) -> tuple:
    """The arguments with every index brought into its range."""
    name = func._schema.name.split("::")[1].rstrip("_")

    def inside(i: Any, n: int) -> Any:
        if not whole(i) or not n:
            return i
        return i % n if how == "around" else i.clamp(0, n - 1)

    if name in ("index_add", "index_select", "gather", "scatter_add", "scatter", "index_copy") and len(args) > 2:
        return replaced(args, 2, inside(args[2], args[0].shape[args[1]] if args[0].dim() else 0))
    if name in ("index", "index_put"):
        new = [inside(i, args[0].shape[d]) if isinstance(i, Tensor) else i for d, i in enumerate(args[1])]
        return replaced(args, 1, new)
    return args


_INSIDE = (
    f"{os.sep}torch{os.sep}",
    f"{os.sep}goldsmith{os.sep}assay{os.sep}",
    f"{os.sep}goldsmith{os.sep}core{os.sep}tracing.py",
)


def _line() -> str:
    """File and line of the nearest frame outside torch and the assay; "" in autograd's backward."""
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _INSIDE):
        if frame.f_code.co_name == "_gradients":
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def seen_through(new: Tensor, view: Tensor) -> Tensor | None:
    """`new`, which replaces a whole storage, seen through the layout of `view`; None if the sizes do not fit."""
    if view.untyped_storage().nbytes() != new.numel() * view.element_size() or new.dtype != view.dtype:
        return None
    return new.as_strided(view.shape, view.stride(), view.storage_offset())


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def with_result(change: Callable[..., Tensor]) -> Changed:
    """A change that replaces the operator's result y by change(y)."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        new = change(out)
        return out.copy_(new) if _writes(func) else new

    return run


def with_arguments(change: Callable[..., tuple]) -> Changed:
    """The operator called with changed arguments."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        return func(*change(args), **kwargs)

    return run


def instead(make: Callable[..., Tensor]) -> Changed:
    """Another function of the same arguments; written in place if the operator is in place."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        if _writes(func):
            return args[0].copy_(make(args[0].clone(), *args[1:], **kwargs))
        return make(*args, **kwargs)

    return run


def replaced(args: tuple, i: int, value: Any) -> tuple:
    return (*args[:i], value, *args[i + 1 :])


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.float64, torch.float32)


def masks(x: Any) -> bool:
    """Whether the tensor's storage holds only 0 and 1, and both of them."""
    if not floating(x) or not x.numel():
        return False
    lying = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return bool(((lying == 0) | (lying == 1)).all()) and bool((lying != lying[:1]).any())


def whole(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
