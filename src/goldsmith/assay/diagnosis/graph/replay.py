"""Replay: runs a recorded golden again from one operator on, without the golden's Python code.

A search asks thousands of times what the golden makes with one operator changed. Most of such a run equals the recorded
one. A replay calls only the operators that the change reaches, and takes everything else from the recording.

Tensors are identified by their storage, since views and autograd's saved tensors are other objects on the same storage.
Whatever the recording cannot answer (`Unknown`) needs a whole run: values that the golden's Python may have read, other
shapes, changed views, random numbers, lists among the replaced tensors that the backward reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .node import Changed, Instead, Key, Observed
from .recording import Listening
from .tensors import floating, seen_through

_MOST_BYTES = 1 << 28  # of storages that are written several times, of which each state is kept
_LAST = sys.maxsize
_DRAWN = torch.Tag.nondeterministic_seeded


class Unknown(Exception):
    """The recording does not contain the answer."""


class Seen:
    """A tensor that an operator read or made; `layout` describes its part of the storage."""

    __slots__ = ("dtype", "layout", "place", "shape", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor, self.place = tensor, _place(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.layout = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def of(self, memory: Tensor) -> Tensor:
        """The same part of another storage."""
        if memory.dtype == self.dtype:
            return memory.as_strided(*self.layout)
        shape, strides, offset = self.layout
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
            memory.untyped_storage(), offset, shape, strides
        )


@dataclass(frozen=True)
class Step:
    """One recorded operator.

    args, kwargs  with Seen in place of tensors
    out           its result, also with Seen in place of tensors
    places        the storages that it read
    written       the storages among them that it writes to
    views         whether its result is a view
    backward      whether the backward called it
    """

    index: int
    func: Any
    args: tuple
    kwargs: dict[str, Any]
    out: tuple
    places: frozenset[int]
    written: tuple[int, ...]
    views: bool
    backward: bool


class Taping(Listening):
    """Records all tensors that a run computes, with each state of a storage that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.states: dict[int, list[tuple[int, Tensor]]] = {}  # storage -> (index of the operator, contents after it)
        self.bytes = 0
        self.leaves: dict[str, Seen] = {}
        self.forward: dict[Key, Seen] = {}  # forward tensors by the key of their maker

    def call_it(self, tensor: Tensor, name: str, *, leaf: bool = False) -> None:
        if leaf and tensor.numel():
            self.leaves[name] = self.forward[name] = Seen(tensor)
            self.keys[_place(tensor)] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        index, self.count = self.count, self.count + 1
        written = {_place(t): t for t in _written(func, args, kwargs)} if func._schema.is_mutable else {}
        for place, t in written.items():
            if place not in self.states:
                self._keep(place, -1, t)
        out = func(*args, **kwargs)
        for place, t in written.items():
            self._keep(place, index, t)
        seen_args, named, seen_out = _seen(args), {n: _seen(v) for n, v in kwargs.items()}, _seen(_parts(out))
        places = frozenset(s.place for s in _all((seen_args, tuple(named.values()))))
        views = bool(_all(seen_out)) and not written and places.issuperset(s.place for s in _all(seen_out))
        self.steps.append(Step(index, func, seen_args, named, seen_out, places, tuple(written), views, self.backward))
        for one in _all(seen_out):
            if self.keys.setdefault(one.place, index) == index and isinstance(out, Tensor) and not self.backward:
                self.forward[index] = one
        return out

    def _keep(self, place: int, index: int, t: Tensor) -> None:
        self.bytes += t.untyped_storage().nbytes()
        if self.bytes <= _MOST_BYTES:
            self.states.setdefault(place, []).append((index, _all_of_it(t).clone()))


class Replay:
    """The tensor `result` of a recorded run, recomputed with some operators changed."""

    def __init__(self, tape: Taping, result: Tensor):
        self.result = Seen(result)
        self.states, self.leaves = tape.states, tape.leaves
        self.keys, self.forward = tape.keys, tape.forward
        self.back = next((step.index for step in tape.steps if step.backward), _LAST)
        self.whole = tape.bytes <= _MOST_BYTES
        self.views = {step.index for step in tape.steps if step.views}
        self.steps = self._behind(tape.steps)
        self.behind = {step.index for step in self.steps}

    def _behind(self, steps: list[Step]) -> list[Step]:
        """Operators that the result depends on, or whose values Python may have read: numbers, places, counts."""
        wanted = {self.result.place}
        kept = []
        for step in reversed(steps):
            if _readable(step.out) or not wanted.isdisjoint((*step.written, *(s.place for s in _all(step.out)))):
                wanted |= step.places
                kept.append(step)
        return kept[::-1]

    def value(
        self, changes: Mapping[int, Changed], leaves: Mapping[str, Tensor], saved: Instead | None = None
    ) -> Tensor:
        """The result, recomputed with the changed `leaves`; `saved` gives replacements for the backward's reads.

        Raises Unknown if only a whole run can answer, and any error of an operator whose changed arguments do not fit.
        """
        if not self.whole or not self.views.isdisjoint(changes):
            raise Unknown  # later reads of the view cannot be distinguished from reads of its base
        if any(isinstance(change, Observed) and at not in self.behind for at, change in changes.items()):
            raise Unknown  # a change reads a tensor that the result does not depend on
        changed: dict[int, Tensor] = {}
        with torch.no_grad():
            for name, new in leaves.items():
                self._place_leaf(self.leaves.get(name), new, changed)
            others = {} if saved is None else self._others(saved, changes, leaves)
            for step in self.steps:
                change = changes.get(step.index)
                reached = not step.places.isdisjoint(changed) or step.backward and not step.places.isdisjoint(others)
                if change is not None or reached and not step.views:
                    self._again(step, change, changed, others if step.backward else {})
            return self._now(self.result, _LAST, changed).clone()

    def _others(
        self, saved: Instead, changes: Mapping[int, Changed], leaves: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Replacements for the storages that the backward reads."""
        if changes or leaves:
            raise Unknown  # the replacement would depend on the changed tensors
        new = saved({key: self._now(seen, self.back, {}) for key, seen in self.forward.items()})
        others = {place: new[key] for place, key in self.keys.items() if key in new}
        if self.result.place in others:
            raise Unknown
        return others

    def _again(
        self, step: Step, change: Changed | None, changed: dict[int, Tensor], others: Mapping[int, Tensor]
    ) -> None:
        if _DRAWN in step.func.tags:
            raise Unknown
        for place in step.written:
            if place not in changed:
                changed[place] = self._state(place, step.index).clone()
        args = self._now(step.args, step.index, changed)
        if others:
            args = _otherwise(step, args, others)
        kwargs = {name: self._now(value, step.index, changed) for name, value in step.kwargs.items()}
        out = _parts(step.func(*args, **kwargs) if change is None else change(step.func, args, kwargs))
        if len(step.out) != len(out):
            raise Unknown
        places = {_place(t) for t in _tensors((args, tuple(kwargs.values())))} if change is not None else ()
        for old, new in zip(step.out, out, strict=True):
            if isinstance(old, Tensor):  # without elements
                if not isinstance(new, Tensor) or new.shape != old.shape:
                    raise Unknown
            elif not isinstance(old, Seen):
                if old is not new and old != new:
                    raise Unknown  # a number that the golden's Python has
            elif not isinstance(new, Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                raise Unknown
            elif new.numel():
                self._take(step, old, new, changed, fresh=not places or _place(new) not in places)

    def _take(self, step: Step, old: Seen, new: Tensor, changed: dict[int, Tensor], *, fresh: bool) -> None:
        """Puts an operator's new result in the place of the recorded one."""
        if old.place in step.written:
            if _place(new) != _place(changed[old.place]):
                raise Unknown
        elif old.place not in step.places:
            if not _numbers(new):
                if torch.equal(old.tensor, new):
                    return
                raise Unknown  # places and counts, which the golden's Python may have read
            changed[old.place] = _laid_out(new, old, fresh=fresh)

    @staticmethod
    def _place_leaf(old: Seen | None, new: Tensor, changed: dict[int, Tensor]) -> None:
        if old is None or new.shape != old.shape or new.dtype != old.dtype:
            raise Unknown
        if not torch.equal(old.tensor, new):
            if not _numbers(new):
                raise Unknown
            changed[old.place] = _laid_out(new, old, fresh=False)

    def _state(self, place: int, index: int) -> Tensor:
        """The contents of a storage before an operator was called."""
        return next(contents for after, contents in reversed(self.states[place]) if after < index)

    def _now(self, value: Any, index: int, changed: Mapping[int, Tensor]) -> Any:
        """The current value of a recorded tensor at that operator; lists and tuples item by item."""
        if isinstance(value, Seen):
            memory = changed.get(value.place)
            if memory is not None:
                return value.of(memory)
            return value.of(self._state(value.place, index)) if value.place in self.states else value.tensor
        if isinstance(value, tuple):
            return tuple([self._now(v, index, changed) for v in value])
        return [self._now(v, index, changed) for v in value] if isinstance(value, list) else value


def taped(run: Callable[[Taping], Mapping[str, Tensor]], tensor: str) -> Replay | None:
    """A replay of the golden up to a tensor, None if it does not make that tensor; `run` runs it under a mode."""
    tape = Taping()
    result = run(tape).get(tensor)
    return None if result is None or not result.numel() else Replay(tape, result)


def _otherwise(step: Step, args: tuple, others: Mapping[int, Tensor]) -> tuple:
    """An operator's arguments, with the replacements that the backward reads."""
    inside = [s for a in (*step.args, *step.kwargs.values()) if not isinstance(a, Seen) for s in _all(a)]
    inside += [s for s in step.kwargs.values() if isinstance(s, Seen)]
    if not others.keys().isdisjoint((*step.written, *(s.place for s in inside if floating(s.tensor)))):
        raise Unknown  # a whole run does not replace tensors that are written, or tensors in lists
    read = [
        seen_through(others[old.place], old.tensor)
        if isinstance(old, Seen) and old.place in others and floating(old.tensor)
        else None
        for old in step.args
    ]
    return tuple(now if new is None else new for now, new in zip(args, read, strict=True))


def _laid_out(new: Tensor, old: Seen, *, fresh: bool) -> Tensor:
    """`new` with the memory layout of `old`; copied unless it owns its storage alone."""
    if fresh and (new.shape, new.stride(), new.storage_offset()) == old.layout:
        return new
    memory = torch.empty_like(_all_of_it(old.tensor))
    old.of(memory).copy_(new)
    return memory


def _all_of_it(t: Tensor) -> Tensor:
    """The whole storage of a tensor, as one row of numbers."""
    storage = t.untyped_storage()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        storage, 0, (storage.nbytes() // t.element_size(),), (1,)
    )


def _numbers(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex() or t.dtype == torch.bool


def _readable(out: tuple) -> bool:
    """Whether Python can read the result: a number, or a tensor of a dtype outside `_numbers`."""
    return any(not _numbers(o.tensor) if isinstance(o, Seen) else not isinstance(o, Tensor | None) for o in out)


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _parts(value: Any) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _seen(value: Any) -> Any:
    """The same with Seen in place of tensors; tensors without a storage stay, as nothing can change them."""
    if isinstance(value, Tensor):
        return Seen(value) if value.numel() else value
    return type(value)(map(_seen, value)) if isinstance(value, list | tuple) else value


def _all(value: Any) -> list[Seen]:
    if isinstance(value, Seen):
        return [value]
    return [s for v in value for s in _all(v)] if isinstance(value, list | tuple) else []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.numel() else []
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operator writes to."""
    tensors = []
    for i, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            tensors += _tensors(kwargs.get(arg.name) if arg.kwarg_only or i >= len(args) else args[i])
    return tensors
