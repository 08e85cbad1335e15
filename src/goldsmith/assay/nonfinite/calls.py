"""A call of a watched module, with everything that is needed to repeat it with the same numbers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

SMALL_BUFFER, SMALL_BUFFERS = 1 << 16, 1 << 20  # elements of one buffer, and of all, that are copied before a call


@dataclass(frozen=True)
class Flag:
    """A tensor that is not finite: the module and which of its tensors it is, the least and the greatest element."""

    path: str
    role: str
    low: float
    high: float
    total: int
    count: int | None = None
    index: tuple[int, ...] | None = None


@dataclass(eq=False)
class ModuleCall:
    """One call of a watched module by code outside of the watched modules.

    random, buffers, autocast   the state before the call
    versions                    its tensors with their version counters, which tell whether one was overwritten
    gradients                   the gradients that arrived at its outputs, by their number
    nodes                       the nodes of autograd's graph that made its outputs
    flags, gradient_flags       what was not finite in the forward and in the backward
    """

    module: torch.nn.Module
    path: str
    args: tuple
    kwargs: dict[str, Any]
    buffers: list[tuple[Tensor, Tensor]]
    random: RandomStates
    autocast: list[tuple[str, bool, torch.dtype]]
    versions: list[tuple[Tensor, int]]
    handles: list[Any] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    gradient_flags: list[Flag] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)

    def forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.gradients.clear()
        self.nodes.clear()

    def obstacle(self) -> str:
        """Why this call cannot be repeated with the same numbers; "" if it can."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return "other processes take part in it"
        if any(tensor._version != version for tensor, version in self.versions):
            return "one of its arguments or parameters has been overwritten since"
        return ""

    def arguments(self, detached: bool) -> tuple[tuple, dict[str, object]]:
        """The arguments; detached from the graph that leads to them, which may no longer exist in the backward."""
        if not detached:
            return self.args, self.kwargs
        return tree_map(_detached, self.args), tree_map(_detached, self.kwargs)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The random numbers, small buffers and autocast from before the call; afterwards those of now return."""
        now, buffers = RandomStates(self.random.devices), [b for b, _ in self.buffers]
        kept = list(zip(buffers, _copies(buffers), strict=True))
        self.random.restore()
        _write(self.buffers)
        try:
            with contextlib.ExitStack() as stack:
                for device, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                yield
        finally:
            _write(kept)
            now.restore()


class RandomStates:
    """The states of torch's, Python's and, if it is loaded, numpy's generators."""

    def __init__(self, devices: list[torch.device]):
        self.devices = devices
        self.torch = torch.get_rng_state()
        self.on = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state(legacy=False) if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        for device, state in self.on:
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def begin(
    module: torch.nn.Module, path: str, args: tuple, kwargs: dict[str, object], parameters: list[Tensor],
    buffers: list[Tensor],
) -> ModuleCall:  # fmt: skip
    """The call that is about to run. buffers: those of the module that are copied."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    devices: list[torch.device] = []
    if torch.cuda.is_initialized():
        on = {t.device for t in tensors if t.is_cuda} | {torch.device("cuda", torch.cuda.current_device())}
        devices = sorted(on, key=str)
    kinds = ["cpu", *(["cuda"] if devices else [])]
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    copies = list(zip(buffers, _copies(buffers), strict=True))
    versions = [(t, t._version) for t in [*tensors, *parameters] if not t.is_inference()]
    return ModuleCall(module, path, args, kwargs, copies, RandomStates(devices), autocast, versions)


def small_buffers(module: torch.nn.Module) -> list[Tensor]:
    """The buffers that a call may change and that cost little to copy, such as running statistics."""
    chosen, total = [], 0
    for buffer in module.buffers():
        if type(buffer) is Tensor and buffer.numel() <= SMALL_BUFFER and total + buffer.numel() <= SMALL_BUFFERS:
            chosen.append(buffer)
            total += buffer.numel()
    return chosen


def _detached(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    with torch._C._DisableTorchDispatch():
        return [tensor.clone() for tensor in tensors]


def _write(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch._C._DisableTorchDispatch():
        for buffer, value in pairs:
            buffer.data.copy_(value)  # .data: the buffer may be saved for a backward, which would refuse a new version
