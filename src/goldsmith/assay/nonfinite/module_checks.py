"""The level "modules" of a watch: the tensors of every module are checked, and a call that fails is repeated.

While a watched module runs, the dispatch mode is off the stack. Hooks check the arguments, the outputs, the gradients
of both and those of the parameters. If one of them is not finite, the outermost module's call is repeated under the
dispatch mode, with the same random numbers, arguments, parameters and small buffers; the mode then reports events as it
would have done at once. What cannot be repeated, or is finite the second time, is an event of the module itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..support.memory_errors import of_a_gpu
from . import events as facts
from .calls import Flag, ModuleCall, begin, small_buffers
from .events import Event, Likely
from .interfaces import Host
from .norms import Figures, measure_ends, read_stacks
from .operators import WatchMode
from .storage_history import BACKWARD, FORWARD

GIVEN = ("argument", "buffer")  # tensors that a module gets, and does not make
Waiting = tuple[
    ModuleCall, bool, str, str, int, Tensor
]  # call, whether of the backward, path, tensor, elements, figures


class ModuleTensors:
    """The tensors of an outermost module."""

    def __init__(self, module: torch.nn.Module):
        self.parameters: list[Tensor] = list(module.parameters())
        self.ids = {id(p) for p in self.parameters}
        self.buffers = small_buffers(module)


class ModuleChecks:
    """Checks the calls of watched modules for a watch, and repeats those that are not finite."""

    def __init__(self, host: Host, mode: WatchMode):
        self.host, self.mode = host, mode
        self.call: ModuleCall | None = None  # the one that runs
        self.repeating = False
        self.backward_may_come = False  # a function mode waits for it; it costs every function and attribute of tensors
        self.inside = False  # the backward is inside a module
        self._calls: list[ModuleCall] = []  # of this step: a backward may come
        self._waiting: list[Waiting] = []
        self._queued = False  # the end of this backward is awaited
        self._intended: set[tuple[str, str, float]] = set()  # infinities that the program means, with their sign
        self._again: dict[tuple[str, str], bool] = {}  # what was not finite the second time; True: the program means it
        self._earlier: list[Event] = []  # those that a repeated call meets again
        self._state: dict[torch.nn.Module, ModuleTensors] = {}

    # the forward

    def begin(self, module: torch.nn.Module, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Code outside of the watched modules calls one of them."""
        self.settle()
        state = self._state.get(module)
        if state is None:
            state = self._state[module] = ModuleTensors(module)
        self.call = call = begin(module, path, args, kwargs, state.parameters, state.buffers)
        self.host.arrange()
        for number, tensor in enumerate(t for t in facts.leaves((args, kwargs)) if facts.plain(t)):
            role = f"argument {number}"
            self.see(call, path, role, tensor, measure_ends(tensor))
            if tensor.requires_grad and not tensor.is_leaf:
                call.handles.append(tensor.register_hook(partial(self._depart, call, path, f"{role}'s gradient")))

    def see(
        self, call: ModuleCall, path: str, role: str, tensor: Tensor, figures: Figures,
        backward: bool = False,
    ) -> None:  # fmt: skip
        """Judge a tensor by its figures, of which the first two are its least and its greatest element."""
        if backward:
            self._await_end()
        if isinstance(figures, Tensor):
            self._waiting.append((call, backward, path, role, tensor.numel(), figures))
            return
        low, high = figures[:2]
        if not (math.isfinite(low) and math.isfinite(high)) and not self._is_intended(path, role, low, high):
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                if role.startswith(GIVEN) and bool(facts.additive_mask(tensor)):
                    self._intended.add((path, role, -math.inf))
                    return
                count, index = facts.where(tensor)
            flags = call.gradient_flags if backward and call is not self.call else call.flags
            flags.append(Flag(path, role, low, high, tensor.numel(), count, index))

    def end(self, output: object) -> None:
        """The outermost module returns, or raises."""
        call = self.call
        if call is None:
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            numbered = [(n, b) for n, (b, _) in enumerate(call.buffers) if facts.plain(b)]
            peaks = torch._foreach_norm([b for _, b in numbered], math.inf) if numbered else []
        bad = zip(numbered, torch.stack([p.double() for p in peaks]).tolist() if peaks else [], strict=True)
        for (number, buffer), peak in bad:
            if not math.isfinite(peak):
                self.see(call, call.path, f"buffer {number}", buffer, measure_ends(buffer))
        self._resolve()
        self.call = None
        outputs = [t for t in facts.leaves(output) if facts.plain(t)]
        if any(t.requires_grad for t in outputs):
            self.backward_may_come = True
            self._calls.append(call)
        for buffer, _ in call.buffers:
            self.mode.forget(buffer)
        for number, tensor in enumerate(outputs):
            if self.mode.entry(tensor) is None:
                role = output_name(number)
                meant = any((call.path, role, end) in self._intended for end in (-math.inf, math.inf))
                self.mode.record(tensor, f"the call of {call.path}", 0.0, meant=meant)
            if tensor.requires_grad:
                call.nodes.append(tensor.grad_fn)
                tensor.register_hook(partial(self._arrive, call, number))
        self.host.arrange()
        raised = output is None and isinstance(sys.exc_info()[1], Exception)
        if call.flags or raised and not of_a_gpu(sys.exc_info()[1]):
            self._repeat([call], outputs, backward=False, stop=self.host.stop and not raised)

    # the backward

    def output_nodes(self) -> set[object]:
        """The nodes of autograd's graph that made the outputs of this step's calls."""
        return {node for call in self._calls for node in call.nodes}

    def _arrive(self, call: ModuleCall, number: int, gradient: Tensor) -> None:
        """The backward enters a module."""
        call.gradients[number] = gradient.detach()
        if self.host.has_event(BACKWARD) and not math.isfinite(peak := facts.quiet_peak(gradient)):
            self.mode.record(gradient, "", peak, reported=True)  # the sum of several, of which one was reported
        self._await_end()
        self.inside = True
        self.host.arrange()

    def _depart(self, call: ModuleCall, path: str, role: str, gradient: Tensor) -> None:
        """The backward leaves a module for the code that made its argument."""
        if facts.plain(gradient):
            self.see(call, path, role, gradient, measure_ends(gradient), backward=True)
        self.inside = False
        self.host.arrange()

    def see_gradient(self, name: str, parameter: Tensor, gradient: Tensor, figures: Figures) -> None:
        """The gradient of a parameter, when it has been added."""
        history = self.mode.entry(gradient)
        if history is not None and history.reported:
            return
        for call in self._calls:
            if id(parameter) in self._state[call.module].ids:
                self.see(call, name, "gradient", gradient, figures, backward=True)

    def _await_end(self) -> None:
        if not self._queued and self.call is None and torch._C._current_autograd_node() is not None:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._queued = self.inside = False
        self.host.arrange()
        if self.host.is_own_thread():
            self.settle()

    def settle(self) -> None:
        """Judge the backward so far: called when it ends, and before anything can change the parameters."""
        self._resolve()
        if self.call is not None or self.repeating:
            return
        if any(call.gradient_flags for call in self._calls):
            self._repeat([call for call in self._calls if call.gradient_flags], [], True, self.host.stop)
        for call in self._calls:
            call.gradients.clear()

    def forget(self) -> None:
        """The step is over."""
        for call in self._calls:
            call.forget()
        self._calls.clear()
        self.backward_may_come = False

    def _resolve(self) -> None:
        """Read figures that are still on a device."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            values = read_stacks([w[5] for w in waiting])
        for (call, backward, path, role, total, _), (low, high, *_) in zip(waiting, values, strict=True):
            finite = math.isfinite(low) and math.isfinite(high)
            if not finite and not self._is_intended(path, role, low, high):
                flags = call.gradient_flags if backward and call is not self.call else call.flags
                flags.append(Flag(path, role, low, high, total))

    def _is_intended(self, path: str, role: str, low: float, high: float) -> bool:
        return not math.isnan(low) and all(math.isfinite(e) or (path, role, e) in self._intended for e in (low, high))

    # the second time

    def is_known(self, event: Event) -> bool:
        """Whether an event of a repeated call is one that was reported before it was repeated."""
        place = (
            next((n for n, seen in enumerate(self._earlier) if _same(event, seen)), None) if self.repeating else None
        )
        if place is None:
            return False
        del self._earlier[place]
        return True

    def _repeat(self, calls: list[ModuleCall], outputs: list[Tensor], backward: bool, stop: bool) -> None:
        """Repeat calls, and their backward, under the dispatch mode, which reports events."""
        before = len(self.host.events) + self.host.more
        self._again = {}
        flags: list[tuple[ModuleCall, Flag, str]] = []
        for call in calls:
            mine = call.gradient_flags if backward else call.flags
            self._earlier = list(self.host.events)
            obstacle = call.obstacle() or self._run_again(call, outputs, backward)
            flags += [(call, flag, obstacle) for flag in mine]
            mine.clear()
        missed = [f for f in flags if (f[1].path, f[1].role) not in self._again and not _may_be_mask(f[1], f[2])]
        if len(self.host.events) + self.host.more == before:
            for _, flag, _ in flags:
                if self._again.get((flag.path, flag.role)):
                    self._intended |= {(flag.path, flag.role, end) for end in (flag.low, flag.high) if math.isinf(end)}
            if missed and not self.host.has_event(BACKWARD if backward else FORWARD):
                self._mark(outputs)
                self._report(*missed[0], [flag for _, flag, _ in flags], backward)
        elif stop:
            raise facts.NonFinite(self.host.events[min(before, len(self.host.events) - 1)])

    def _run_again(self, call: ModuleCall, outputs: list[Tensor], backward: bool) -> str:
        """Run it under the dispatch mode; returns what went wrong, or ""."""
        args, kwargs = call.arguments(detached=backward)
        try:
            with call.restored(), torch.set_grad_enabled(backward or torch.is_grad_enabled()):
                self.repeating = True
                self.host.arrange()
                try:
                    again = [t for t in facts.leaves(call.module(*args, **kwargs)) if facts.plain(t)]
                    if backward:
                        self._run_backward_again(
                            call, again, [t for t in facts.leaves((args, kwargs)) if facts.plain(t)]
                        )
                finally:
                    self.repeating = False
                    self.host.arrange()
                for role, tensors in (
                    ("argument", facts.leaves((args, kwargs))),
                    ("buffer", [b for b, _ in call.buffers]),
                ):
                    for number, tensor in enumerate(t for t in tensors if facts.plain(t)):
                        self.saw_again(call.path, f"{role} {number}", tensor)
                if len(again) == len(outputs):
                    self._transfer(again, outputs)
        except Exception as error:  # noqa: BLE001 - the module is the user's, and may raise anything
            return f"called again it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ""

    def _run_backward_again(self, call: ModuleCall, outputs: list[Tensor], arguments: list[Tensor]) -> None:
        pairs = [(outputs[n], g) for n, g in call.gradients.items() if n < len(outputs) and outputs[n].requires_grad]
        names = {id(t): (call.path, f"argument {n}'s gradient") for n, t in enumerate(arguments)}
        names |= {id(p): (self.host.name_of(p), "gradient") for p in self._state[call.module].parameters}
        wanted = [t for t in (*self._state[call.module].parameters, *arguments) if t.requires_grad]
        if not pairs or not wanted:
            return
        for _, gradient in pairs:
            if self.mode.entry(gradient) is None:
                self.mode.record(
                    gradient, "", facts.quiet_peak(gradient)
                ).name = f"the gradient of {call.path}'s output"
        gradients = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        for tensor, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None and facts.plain(gradient):
                self.saw_again(*names[id(tensor)], gradient)
                if facts.plain(tensor.grad):
                    self._transfer([gradient], [tensor.grad])  # type: ignore[list-item]

    def saw_again(self, path: str, role: str, tensor: Tensor) -> None:
        """Note whether a tensor is not finite this time, too, and whether the program means its infinities."""
        peak = facts.quiet_peak(tensor)
        if not math.isfinite(peak):
            history = self.mode.entry(tensor)
            self._again[path, role] = (
                math.isinf(peak) and history is not None and history.meant and not history.reported
            )

    def _transfer(self, again: Iterable[Tensor], first: Iterable[Tensor]) -> None:
        """What the mode knows about the second results holds for the first."""
        for new, old in zip(again, first, strict=True):
            history, peak = self.mode.entry(new), facts.quiet_peak(old)
            if history is not None and not math.isfinite(peak):
                self.mode.record(old, history.writer, peak, meant=history.meant, reported=history.reported)

    def _mark(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not math.isfinite(peak := facts.quiet_peak(tensor)):
                self.mode.record(tensor, "", peak, reported=True)

    def _report(self, call: ModuleCall, flag: Flag, obstacle: str, flags: list[Flag], backward: bool) -> None:
        """An event of the module itself."""
        gradient = backward or flag.role.endswith("gradient")
        entered = next((f.role for f in flags if f.role.startswith("argument") and not backward), "")
        kind = type(self.host.module_at(flag.path) or call.module).__name__
        op = f"{kind}.{'backward' if gradient else 'forward'}"
        if obstacle:
            evidence = (
                f'only results were seen, and the call cannot be repeated: {obstacle}; level="operators" sees all'
            )
        else:
            evidence = (
                "finite when the call is repeated with the same arguments: a race, or a state that the call changes"
            )
        place = self.host.place()
        self.host.report(
            Event(
                facts.kind_of(facts.larger_end(flag.low, flag.high)), BACKWARD if gradient else FORWARD, flag.path, op,
                flag.role, flag.count, flag.total, flag.index, (), not entered,
                f"{entered} of {call.path}" if entered else op, place.step, facts.frame_texts(place.stack),
                Likely("unknown", evidence),
            )
        )  # fmt: skip


def output_name(number: int) -> str:
    return "output" if number == 0 else f"output {number}"


def _may_be_mask(flag: Flag, obstacle: str) -> bool:
    """Whether infinities may be a mask's, where nobody can tell because the call was not repeated."""
    return bool(obstacle) and flag.low == -math.inf and math.isfinite(flag.high)


def _same(a: Event, b: Event) -> bool:
    return (a.step, a.phase, a.module, a.op, a.tensor, a.index) == (b.step, b.phase, b.module, b.op, b.tensor, b.index)
