"""The level "modules" of a watch, for optimizers: a step is checked by its results, not operator by operator.

An optimizer on the CPU may run more operators than the model. So the dispatch mode is off the stack during a step, and
afterwards the parameters and the optimizer's state are checked. What is not finite then is an event of the step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import events as facts
from .deferred_flags import read_all
from .events import Event, Likely, Operand
from .interfaces import Host
from .operators import WatchMode
from .storage_history import FORWARD

SMALL = 1 << 16  # smaller tensors are copied into one, which is faster than an operator for each
EVIDENCE = 'only its results were seen; level="operators" names the operator'


class OptimizerChecks:
    """Hooks on every optimizer's step; `running` is true while one runs unseen."""

    def __init__(self, host: Host, mode: WatchMode):
        self.host, self.mode = host, mode
        self.running = False

    def hooks(self) -> list[object]:
        """Register the hooks; each handle removes one."""
        return [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self.host.is_own_thread() or not self.host.before_optimizer():
            return
        if any(callable(a) for a in (*args, *kwargs.values())):
            return  # a closure runs the model
        self.running = True
        self.host.arrange()

    def _end(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self.running or not self.host.is_own_thread():
            return
        changed = _changed(optimizer)
        bad = _not_finite([tensor for _, _, tensor in changed])
        self.running = False
        self.host.arrange()
        for (parameter, key, tensor), peak in zip(changed, bad, strict=True):
            self.mode.forget(tensor)
            history = self.mode.entry(tensor)
            if math.isfinite(peak) or history is not None and history.reported:
                continue
            gradient = parameter.grad
            gradient_peak = facts.quiet_peak(gradient) if gradient is not None and facts.plain(gradient) else 0.0
            self.mode.record(tensor, "", peak, reported=True)
            if math.isfinite(gradient_peak):
                self._report(optimizer, parameter, key, tensor, peak, gradient_peak)

    def _report(
        self, optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, tensor: Tensor, peak: float,
        gradient: float,
    ) -> None:  # fmt: skip
        name = self.host.name_of(parameter) or "a parameter"
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            count, index = facts.where(tensor)
        place, op = self.host.place(), f"{type(optimizer).__name__}.step"
        read = Operand(tuple(parameter.shape), facts.name_of(parameter.dtype), gradient, f"gradient of {name}")
        self.host.report(
            Event(
                facts.kind_of(peak), FORWARD, "", op, f"{key} of {name}" if key else name, count, tensor.numel(), index,
                (read,), True, op, place.step, facts.frame_texts(place.stack), Likely("unknown", EVIDENCE),
            )
        )  # fmt: skip


def _changed(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, key of its state or "", tensor) for every tensor that a step may have changed."""
    rows = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            rows.append((parameter, "", parameter))
            state = optimizer.state.get(parameter, {})
            rows += [(parameter, key, t) for key, t in state.items() if isinstance(t, Tensor) and t.dim() > 0]
    return [row for row in rows if facts.plain(row[2])]


def _not_finite(tensors: list[Tensor]) -> list[float]:
    """max |x| of each tensor that is not finite, 0 for the others."""
    if not tensors:
        return []
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() <= SMALL:
                small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        sums = [torch._utils._flatten_dense_tensors(group).sum() for group in small.values()]
        sums += [tensor.sum() for tensor in tensors if tensor.numel() > SMALL]
        # a sum is not finite if an element is not, and for other reasons
        if all(math.isfinite(abs(value)) for value in read_all(dict(enumerate(sums))).values()):
            return [0.0] * len(tensors)
        return [_bad_peak(tensor) for tensor in tensors]


def _bad_peak(tensor: Tensor) -> float:
    peak = facts.peak(tensor)
    return 0.0 if math.isfinite(peak) else peak
