"""`watch`: finds the first NaN or Inf of a run and its origin, and records the norms of modules and gradients."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from . import events as facts
from .calls import ModuleCall
from .events import Event, Frames, NonFinite
from .loss_checks import BackwardEntry, LossChecks
from .module_checks import ModuleChecks, output_name
from .norms import Figures, Norm, Norms, measure, measure_ends
from .operators import WatchMode
from .optimizer_checks import OptimizerChecks
from .storage_history import BACKWARD, FORWARD, Place
from .text import table

MOST = 64  # events that are kept
MODULES, OPERATORS = "modules", "operators"
SEQUENCES = 1 << 16  # forward operators whose module and frames are remembered for the backward


def watch(
    *modules: torch.nn.Module, norms: bool = True, every: int = 1, stop: bool = False, sync: bool = True,
    level: str | None = None,
) -> Watch:  # fmt: skip
    """A context manager that finds the first NaN or Inf, forward and backward, and says where it came from.

    modules  modules whose paths, parameters and norms are named; without any, only operators are watched
    norms    record norm, absmax and share of zeros of every module's outputs and of every gradient, step by step
    every    watch only every n-th step; a step is a call of the first module, or ends with `w.step()`
    stop     raise assay.NonFinite at the first event
    sync     False: keep flags on the device and read them at the end of a step. Nothing waits, so that races stay
             visible; count, index and cause are then unknown
    level    "operators": judge the results of every operator. "modules": do so in the first step and outside of the
             modules; later judge the tensors of every module, and repeat a module's call operator by operator if one is
             not finite. None: "modules", but "operators" with sync=False

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
    if level not in (None, MODULES, OPERATORS):
        raise ValueError(f'watch: level={level!r}; expected "modules", "operators" or None')
    if level == MODULES and not sync:
        raise ValueError('watch: level="modules" needs sync=True, because it reads flags to know what to repeat')
    return Watch(modules, norms, every, stop, sync, level or (MODULES if sync else OPERATORS))


class Watch:
    """The watch that `assay.watch` returns; its docstring describes the arguments.

    It may be entered again after its block: its steps, events and norms go on.
    """

    def __init__(
        self, modules: tuple[torch.nn.Module, ...], norms: bool, every: int, stop: bool, sync: bool, level: str
    ):  # fmt: skip
        self.events: list[Event] = []
        self.more = 0
        self.sync, self.every, self.stop, self.level = sync, every, stop, level
        self._modules = modules
        self._norms = Norms() if norms else None
        self._mode = WatchMode(self)
        self._checks = ModuleChecks(self, self._mode)
        self._loss = LossChecks(self, self._mode)
        self._entry = BackwardEntry(self._around_backward)
        self._optimizers = OptimizerChecks(self, self._mode)
        self._handles: list[Any] = []
        self._paths: dict[torch.nn.Module, str] = {}
        self._sources: dict[int, str] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._stack: list[str] = []
        self._thread = 0
        self._sequence: dict[int, tuple[str, Frames]] = {}
        self._step = 0
        self._begun = False
        self.by_hand = False  # a step ends only with step(), however often the first module is called
        self._scratch: dict[int, Tensor] = {}
        self._stance: contextlib.ExitStack = contextlib.ExitStack()
        self._compiler = False  # it has been told to stay out
        self._on = False  # this step is watched
        self._measured: dict[bool, tuple[Tensor, int, Figures]] = {}
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
        self.by_hand = True
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
        if self._on or self._handles:
            raise RuntimeError("watch: this watch is already active; make another one with assay.watch(...)")
        self._thread = threading.get_ident()
        self._hook()
        self._on = self.listening = self._step % self.every == 0
        self._mode.__enter__()
        if self._is_brief_later:
            self._entry.__enter__()
            self._entry.sleep()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._mode.wake()
        self._mode.__exit__(kind, error, at)
        if self._is_brief_later:
            self._entry.wake()
            self._entry.__exit__(kind, error, at)
        self._stack.clear()
        already = isinstance(error, NonFinite)
        try:
            self._finish()
        except NonFinite:
            if not already:
                raise
        finally:
            self._on = self.listening = False
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._sequence.clear()
            self._mode.history.clear()
            self._scratch.clear()
            self._stance.close()
            self._compiler = False
            if self._norms is not None:
                self._norms.read()

    def _finish(self) -> None:
        try:
            self._checks.settle()
        finally:
            self._checks.forget()
            self._measured.clear()
            with torch.utils._python_dispatch._disable_current_modes():  # the watch must not watch itself
                self._mode.flush()

    def _next(self) -> None:
        self._finish()
        self._step += 1
        self._sequence.clear()
        self._on = self._step % self.every == 0
        self.arrange()

    # for the checks of modules and optimizers

    @property
    def _is_brief_later(self) -> bool:
        """Whether the steps after the first are watched by the results of modules and optimizers."""
        return self.level == MODULES and bool(self._modules)

    @property
    def _brief(self) -> bool:
        """Whether this step is watched so."""
        return self._on and self._step > 0 and self._is_brief_later

    def arrange(self) -> None:
        parts = self._checks.call is not None, self._optimizers.running, self._loss.running
        unseen = any(parts) and not self._checks.repeating
        self.listening = self._on and not unseen and not (self._checks.inside and not self._checks.repeating)
        if self.is_own_thread():
            (self._mode.wake if self._on and not unseen else self._mode.sleep)()
            if self._is_brief_later and not self._loss.running:  # a function mode is off the stack while it runs
                armed = self._checks.backward_may_come and self._on and not any(parts)
                (self._entry.wake if armed else self._entry.sleep)()

    def _around_backward(self, roots: list[Tensor], run: Callable[[], object]) -> object:
        if not self._brief or not self.is_own_thread() or self._checks.call is not None or self._checks.repeating:
            return run()
        return self._loss.around(roots, self._checks.output_nodes(), run)

    def before_optimizer(self) -> bool:
        if not self._brief:
            return False
        self._checks.backward_may_come = False
        self._checks.settle()
        return True

    def is_own_thread(self) -> bool:
        """The stack of dispatch modes is the thread's."""
        return threading.get_ident() == self._thread

    def has_event(self, phase: str) -> bool:
        return any(event.step == self._step and event.phase == phase for event in self.events)

    def name_of(self, parameter: Tensor) -> str:
        return self._sources.get(parameter.untyped_storage()._cdata, "")

    def module_at(self, path: str) -> torch.nn.Module | None:
        return next((module for module, of in self._paths.items() if of == path), None)

    # for the dispatch mode

    def place(self) -> Place:
        """The current place in the program; in the backward, the place where the forward operator was called."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            module = self._stack[-1] if self._stack and threading.get_ident() == self._thread else ""
            return Place(FORWARD if node is None else BACKWARD, module, self._step, facts.frames())
        return self.place_of(node._sequence_nr())

    def place_of(self, number: int) -> Place:
        """The place in the backward of the forward operator to which autograd gave this number."""
        module, stack = self._sequence.get(number, ("", ()))
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
        history = self._mode.history.get(storage)
        name = self._sources.get(storage) or (history.writer or history.name if history is not None else "")
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
        """Record an event, and raise it if `stop` is set; when a call is repeated, only what was not seen before."""
        if self._checks.is_known(event):
            return
        if len(self.events) < MOST:
            self.events.append(event)
        else:
            self.more += 1
        if self.stop and not self._checks.repeating:
            raise NonFinite(event)

    # hooks

    def _hook(self) -> None:
        several = len(self._modules) > 1
        for of in (self._paths, self._sources, self._parameters):  # of an earlier block
            of.clear()
        for number, root in enumerate(self._modules):
            for name, module in root.named_modules():
                path = ".".join(p for p in (str(number) if several else "", name) if p) or type(root).__name__
                if module in self._paths:
                    continue
                self._paths[module] = path
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
            prefix = f"{number}." if several else ""
            for name, tensor in root.named_buffers():
                self._sources[tensor.untyped_storage()._cdata] = f"buffer {prefix}{name}"
            for name, tensor in root.named_parameters():
                self._sources[tensor.untyped_storage()._cdata] = f"{prefix}{name}"
                self._parameters[f"{prefix}{name}"] = tensor
                if tensor.requires_grad and (self._norms is not None or self.level == MODULES):
                    hook = self._parameter_hook(f"{prefix}{name}")
                    self._handles.append(tensor.register_post_accumulate_grad_hook(hook))

        if self._is_brief_later:
            self._handles += self._optimizers.hooks()

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        outermost = not self._stack and not self._checks.repeating and torch._C._current_autograd_node() is None
        if outermost and module is self._modules[0] and not self.by_hand:
            if self._begun:
                self._next()
            self._begun = True
        self._stack.append(self._paths[module])
        if outermost and self._brief and self.is_own_thread():
            if not self._compiler and "torch._dynamo" in sys.modules:  # compiled code runs without the modules' hooks
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
                self._compiler = True
            self._checks.begin(module, self._paths[module], args, kwargs)

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        path = self._stack.pop() if self._stack else ""
        call = self._checks.call if not self._checks.repeating else None
        if self._on and (self._norms is not None or call is not None or self._checks.repeating):
            for number, tensor in enumerate(t for t in facts.leaves(output) if facts.plain(t)):
                self._see_output(path, output_name(number), tensor, call)
        if call is not None and not self._stack:
            self._checks.end(output)

    def _see_output(self, path: str, role: str, tensor: Tensor, call: ModuleCall | None) -> None:
        gradient = f"{role}'s gradient"
        if self._checks.repeating:
            self._checks.saw_again(path, role, tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._checks.saw_again(path, gradient, grad))
            return
        self._see(call, path, role, tensor, backward=False)
        if tensor.requires_grad:
            tensor.register_hook(self._gradient_hook(path, gradient, call))

    def _see(self, call: ModuleCall | None, path: str, role: str, tensor: Tensor, backward: bool) -> None:
        """Measure a tensor of a module once, even if it is the tensor of several modules."""
        last = self._measured.get(backward)
        if last is not None and last[0] is tensor and last[1] == _version(tensor):
            figures = last[2]
        else:
            figures = measure(tensor, self._scratch) if self._norms is not None else measure_ends(tensor)
            self._measured[backward] = (tensor, _version(tensor), figures)
        if self._norms is not None:
            self._norms.add(self._step, path, role, tensor.numel(), figures)
        if call is not None:
            self._checks.see(call, path, role, tensor, figures, backward)

    def _gradient_hook(self, path: str, role: str, call: ModuleCall | None) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if self._on and facts.plain(grad):
                self._see(call, path, role, grad, backward=True)

        return hook

    def _parameter_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            grad = parameter.grad
            if not self._on or not facts.plain(grad) or not (self._norms is not None or self._brief):
                return
            figures = measure(grad, self._scratch) if self._norms is not None else measure_ends(grad)  # type: ignore[arg-type]
            if self._norms is not None:
                self._norms.add(self._step, name, "gradient", grad.numel(), figures)  # type: ignore[union-attr]
            if self._brief:
                self._checks.see_gradient(name, parameter, grad, figures)  # type: ignore[arg-type]

        return hook


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
