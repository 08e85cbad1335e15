"""The level "modules" of a watch, for the backward of code outside of the modules, such as a loss.

A dispatch mode that is on the stack when a backward starts costs every operator of it. So a function mode notices
`Tensor.backward` and `torch.autograd.grad`, takes the dispatch mode off, and puts a hook on each node of the graph
between the loss and the modules' outputs. A node that makes NaN or Inf of finite gradients, and of finite tensors that
it saved in the forward, is an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import events as facts
from .events import Event, Likely, Operand
from .interfaces import Host
from .mode_stacks import FunctionStack, SleepingMode
from .operators import WatchMode
from .storage_history import BACKWARD, FOREIGN, REPORTED, owner

MOST_NODES = 256  # outside of the modules
EVIDENCE = 'only the gradients were seen; level="operators" names the operator'
Node = Any  # torch.autograd.graph.Node


class BackwardEntry(SleepingMode, TorchFunctionMode):
    """A function mode that runs every backward through `around`. It is on the stack only outside of the modules."""

    stack = FunctionStack

    def __init__(self, around: Callable[[list[Tensor], Callable[[], Any]], Any]):
        super().__init__()
        self.around = around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.grad:
            roots = [t for t in facts.leaves(args[:1] or kwargs.get("outputs")) if isinstance(t, Tensor)]
            return self.around(roots, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


class LossChecks:
    """Hooks on the nodes of the graph outside of the modules."""

    def __init__(self, host: Host, mode: WatchMode):
        self.host, self.mode = host, mode
        self.running = False

    def around(self, roots: list[Tensor], inner: set[Node], run: Callable[[], object]) -> object:
        """Run a backward from `roots`, unseen by the dispatch mode. inner: the nodes that made the modules' outputs."""
        handles = [node.register_hook(self._hook(node)) for node in _outer_nodes(roots, inner)]
        self.running = True
        self.host.arrange()
        try:
            return run()
        finally:
            self.running = False
            self.host.arrange()
            for handle in handles:
                handle.remove()

    def _hook(self, node: Node) -> Callable[[tuple, tuple], None]:
        name, number = node.name(), node._sequence_nr()

        def hook(gradients: tuple[Tensor | None, ...], read: tuple[Tensor | None, ...]) -> None:
            bad = [(n, t, p) for n, t in enumerate(gradients) if facts.plain(t) and not math.isfinite(p := _peak(t))]
            if not bad:
                return
            peaks = [(t, _peak(t)) for t in read if facts.plain(t)]
            for _, tensor, peak in bad:
                self.mode.record(tensor, name, peak, reported=True)  # type: ignore[arg-type]
            if all(math.isfinite(peak) for _, peak in peaks):
                self._judge(node, name, number, bad[0], peaks)  # type: ignore[arg-type]

        return hook

    def _judge(
        self, node: Node, name: str, number: int, bad: tuple[int, Tensor, float], read: list[tuple[Tensor, float]]
    ) -> None:
        """A node made a value that is not finite of finite gradients: an event, unless its forward read a known one."""
        saved = [(t, p) for t in _saved(node) if not math.isfinite(p := _peak(t))]
        owners = [owner(self.mode.entry(t), p) for t, p in saved]
        if FOREIGN in owners:
            tensor, peak = saved[owners.index(FOREIGN)]
            source = self.host.source(tensor)
            inputs = [*read, (tensor, peak)]
            self._report(name, number, bad, inputs, source, f"what {name} saved in the forward was not finite")
        elif REPORTED not in owners:
            self._report(name, number, bad, read, "", EVIDENCE)

    def _report(
        self, name: str, number: int, bad: tuple[int, Tensor, float], read: list[tuple[Tensor, float]], source: str,
        evidence: str,
    ) -> None:  # fmt: skip
        """source: where a value that is not finite came from; "" if the node made it."""
        place, (result, tensor, peak) = self.host.place_of(number), bad
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            count, index = facts.where(tensor)
        inputs = tuple(
            Operand(tuple(t.shape), facts.name_of(t.dtype), p, "gradient" if math.isfinite(p) else source)
            for t, p in read
        )
        label = f"result {result}" if result else "its result"
        self.host.report(
            Event(
                facts.kind_of(peak), BACKWARD, place.module, name, label, count, tensor.numel(), index, inputs,
                not source, source or name, place.step, facts.frame_texts(place.stack), Likely("unknown", evidence),
            )
        )  # fmt: skip


def _saved(node: Node) -> list[Tensor]:
    """The tensors that a node of autograd saved in the forward; none if a hook of the user refuses to unpack them."""
    try:
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())  # of a torch.autograd.Function
    except RuntimeError:
        return []
    return [t for t in facts.leaves(saved) if facts.plain(t)]


def _outer_nodes(roots: list[Tensor], inner: set[Node]) -> list[Node]:
    """The nodes between the roots and the modules, the first MOST_NODES of them."""
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None and t.grad_fn not in inner]
    visited = set(waiting)
    for node in waiting:
        for other, _ in node.next_functions:
            if other is not None and other not in visited and other not in inner and len(waiting) < MOST_NODES:
                visited.add(other)
                waiting.append(other)
    return [node for node in waiting if not hasattr(node, "variable")]  # a leaf's node makes nothing


def _peak(tensor: Tensor | None) -> float:
    return facts.quiet_peak(tensor)  # type: ignore[arg-type]
