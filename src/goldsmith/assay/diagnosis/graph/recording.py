"""Listening: the mode that records the operators of a run, and changes some of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...support.dispatch_mode import DispatchMode
from .node import Changed, Instead, Key, Node, expression
from .tensors import floating, replaced, seen_through, whole


class Listening(DispatchMode):
    """Counts the operators of a run, records them on request, and changes some."""

    def __init__(self, changes: Mapping[int, Changed] | None = None, *, wrap: str = "", saved: Instead | None = None):
        super().__init__()
        self.changes, self.wrap, self.saved = dict(changes or {}), wrap, saved
        self.count = 0
        self.backward = False
        self.calls: list[Node] | None = None
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
        before = tuple(a.clone() if isinstance(a, Tensor) else a for a in args) if writes(func) else args
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
            call = Node(index, name, before, kwargs, out, operands, self.backward, makers, line, func, owns, read)
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
            self.names.setdefault(place, expression(name, operands, args))

    def _line(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.lines.get(node._sequence_nr(), "")
        line = source_line()
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


def source_line() -> str:
    """File and line of the nearest frame outside torch and the assay; "" in autograd's backward."""
    frame = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _INSIDE):
        if frame.f_code.co_name == "_gradients":
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)
