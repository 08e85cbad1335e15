"""`watch`: finds the first NaN or Inf of a run and its origin, and records the norms of modules and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from . import events as facts
from .events import Event, Frames, NonFinite
from .norms import Norm, Norms
from .operators import WatchMode
from .storage_history import BACKWARD, FORWARD, Place
from .text import table

MOST = 64  # events that are kept
SEQUENCES = 1 << 16  # forward operators whose module and frames are remembered for the backward


def watch(
    *modules: torch.nn.Module, norms: bool = True, every: int = 1, stop: bool = False, sync: bool = True
) -> Watch:
    """A context manager that finds the first NaN or Inf, forward and backward, and says where it came from.

    modules  modules whose paths, parameters and norms are named; without any, only operators are watched
    norms    record norm, absmax and share of zeros of every module's outputs and of every gradient, step by step
    every    watch only every n-th step; a step is a call of the first module, or ends with `w.step()`
    stop     raise assay.NonFinite at the first event
    sync     False: keep flags on the device and read them at the end of a step. Nothing waits, so that races stay
             visible; count, index and cause are then unknown

    `w.first` is the first Event or None; `w.events` lists all that did not result from an earlier one; `w.rows` holds
    the norms; `w.table()` shows everything as text, `w.to_html(path)` as a page. Raises TypeError and ValueError for a
    wrong argument.
    """
    for number, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"watch: argument {number} is of type {type(module).__name__}; expected a torch.nn.Module")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"watch: every={every!r}; expected a whole number of steps, 1 or more")
    for name, value in (("norms", norms), ("stop", stop), ("sync", sync)):
        if not isinstance(value, bool):
            raise TypeError(f"watch: {name}={value!r}; expected True or False")
    return Watch(modules, norms, every, stop, sync)


class Watch:
    """The watch that `assay.watch` returns; its docstring describes the arguments."""

    def __init__(self, modules: tuple[torch.nn.Module, ...], norms: bool, every: int, stop: bool, sync: bool):
        self.events: list[Event] = []
        self.more = 0
        self.sync, self.every, self.stop = sync, every, stop
        self._modules = modules
        self._norms = Norms() if norms else None
        self._mode = WatchMode(self)
        self._handles: list[Any] = []
        self._paths: dict[torch.nn.Module, str] = {}
        self._sources: dict[int, str] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._stack: list[str] = []
        self._thread = 0
        self._sequence: dict[int, tuple[str, Frames]] = {}
        self._step = 0
        self._begun = self._by_hand = False
        self.listening = False

    # for the user

    @property
    def first(self) -> Event | None:
        """The first event, or None."""
        return self.events[0] if self.events else None

    @property
    def rows(self) -> list[Norm]:
        """The norms so far: one row for every step, module or parameter, and quantity."""
        return self._norms.read() if self._norms is not None else []

    def step(self) -> None:
        """End a step by hand: without modules, or where one step calls the module several times."""
        self._by_hand = True
        self._next()

    def table(self) -> str:
        """Events and the norms of the last step, as plain text of 80 columns."""
        return table(self)

    def to_html(self, path: str) -> None:
        """Write everything as one self-contained page."""
        from . import page  # reads the style sheet

        page.write(self, path)

    # the context manager

    def __enter__(self) -> Watch:
        if self.listening or self._handles:
            raise RuntimeError("watch: this watch is already active; make another one with assay.watch(...)")
        self._thread = threading.get_ident()
        self._hook()
        self.listening = True
        self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._mode.wake()
        self._mode.__exit__(kind, error, at)
        self.listening = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._sequence.clear()
        already = isinstance(error, NonFinite)
        try:
            self._finish()
        except NonFinite:
            if not already:
                raise
        self._mode.known.clear()

    def _finish(self) -> None:
        if self._norms is not None:
            self._norms.read()
        with torch.utils._python_dispatch._disable_current_modes():  # the watch must not watch itself
            self._mode.flush()

    def _next(self) -> None:
        self._finish()
        self._step += 1
        self._sequence.clear()
        self.listening = self._step % self.every == 0
        if threading.get_ident() == self._thread:  # the stack of dispatch modes is the thread's
            (self._mode.wake if self.listening else self._mode.sleep)()

    # for the dispatch mode

    def place(self) -> Place:
        """The current place in the program; in the backward, the place where the forward operator was called."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            module = self._stack[-1] if self._stack and threading.get_ident() == self._thread else ""
            return Place(FORWARD if node is None else BACKWARD, module, self._step, facts.frames())
        module, stack = self._sequence.get(node._sequence_nr(), ("", ()))
        return Place(BACKWARD, module, self._step, stack)

    def remember(self) -> None:
        """Record, for the backward, which module and which line call the operator that is about to run.

        Autograd numbers its nodes, and has created the operator's node by now; the first operator under a number
        counts.
        """
        if torch._C._current_autograd_node() is not None:
            return
        number = torch.autograd._get_sequence_nr() - 1
        if number not in self._sequence and len(self._sequence) < SEQUENCES:
            self._sequence[number] = (self._stack[-1] if self._stack else "", facts.frames())

    def source(self, tensor: Tensor) -> str:
        """The name of a parameter, its gradient or a buffer, the operator that made a tensor, or "input"."""
        storage = tensor.untyped_storage()._cdata
        known = self._mode.known.get(storage)
        name = self._sources.get(storage) or (known.writer or known.name if known is not None else "")
        return name or self._gradient(storage) or "input"

    def is_learned(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or a gradient, which never holds a mask."""
        storage = tensor.untyped_storage()._cdata
        return (
            tensor.requires_grad or self._sources.get(storage, "") in self._parameters or bool(self._gradient(storage))
        )

    def _gradient(self, storage: int) -> str:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.untyped_storage()._cdata == storage:
                return f"gradient of {name}"
        return ""

    def report(self, event: Event) -> None:
        """Record an event, and raise it if `stop` is set."""
        if len(self.events) < MOST:
            self.events.append(event)
        else:
            self.more += 1
        if self.stop:
            raise NonFinite(event)

    # hooks

    def _hook(self) -> None:
        several = len(self._modules) > 1
        for number, root in enumerate(self._modules):
            for name, module in root.named_modules():
                path = ".".join(p for p in (str(number) if several else "", name) if p) or type(root).__name__
                if module in self._paths:
                    continue
                self._paths[module] = path
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
            prefix = f"{number}." if several else ""
            for name, tensor in root.named_buffers():
                self._sources[tensor.untyped_storage()._cdata] = f"buffer {prefix}{name}"
            for name, tensor in root.named_parameters():
                self._sources[tensor.untyped_storage()._cdata] = f"{prefix}{name}"
                self._parameters[f"{prefix}{name}"] = tensor
                if self._norms is not None and tensor.requires_grad:
                    hook = self._parameter_hook(f"{prefix}{name}")
                    self._handles.append(tensor.register_post_accumulate_grad_hook(hook))

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if module is self._modules[0] and not self._stack and not self._by_hand:
            if self._begun:
                self._next()
            self._begun = True
        self._stack.append(self._paths[module])

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        path = self._stack.pop() if self._stack else ""
        if self._norms is None or not self.listening:
            return
        for number, tensor in enumerate(t for t in facts.leaves(output) if facts.plain(t)):
            what = "output" if number == 0 else f"output {number}"
            self._norms.add(self._step, path, what, tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(path, f"{what}'s gradient"))

    def _gradient_hook(self, path: str, what: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if self.listening and self._norms is not None and facts.plain(grad):
                self._norms.add(self._step, path, what, grad)

        return hook

    def _parameter_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self.listening and self._norms is not None and facts.plain(parameter.grad):
                self._norms.add(self._step, name, "gradient", parameter.grad)  # type: ignore[arg-type]

        return hook
