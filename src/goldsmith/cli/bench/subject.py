"""What is timed: an operator, or a composite of several, at one size, and the variants that compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...assay.declare.case import Make
from ...assay.declare.target import Target
from ...core.bench import BenchCase
from ...core.op import Op
from ..targets import op_target

OURS = "goldsmith"
T = TypeVar("T")
Tensors = Mapping[str, Tensor | None]
Options = dict[str, Any]  # what an operator takes beside its tensors: numbers, words and flags
Call = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A call that needs another one before it, which is not timed."""

    before: Call
    call: Call

    def __call__(self) -> object:
        self.before()
        return self.call()


@dataclass
class Variant:
    """One way to compute a subject: `forward` returns the visible results, differentiable in `leaves`.

    `comparable` is False for a peer that computes another model at the same cost: its error would mean nothing.
    """

    peer: str
    forward: Callable[[], Tensor | tuple[Tensor, ...] | list[Tensor]]
    leaves: list[Tensor]
    backend: str = ""
    note: str = ""
    comparable: bool = True
    gradients: Callable[[], Call] | None = None  # where autograd is not what computes them

    def results(self) -> tuple[Tensor, ...]:
        out = self.forward()
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    def backward(self) -> Call:
        """The gradients of all leaves, repeatable: the graph is built once, outside the clock."""
        if self.gradients is not None:
            return self.gradients()
        results = [r for r in self.results() if r.requires_grad]
        generator = torch.Generator(device=results[0].device).manual_seed(1)
        grads = [torch.randn(r.shape, generator=generator, dtype=r.dtype, device=r.device) for r in results]
        return lambda: torch.autograd.grad(results, self.leaves, grads, retain_graph=True, allow_unused=True)


class MakeThere(Make):
    """Draws where the tensors are to be: on the CPU the streams of 8192 tokens of 4 x 7168 take seconds."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
        super().__init__(dtype, device, seed)
        self.there = torch.Generator(device=self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.there, device=self.device)
        return drawn.mul_(std).to(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.rand(shape, generator=self.there, device=self.device).to(dtype or self.dtype)
        return torch.where(drawn < 1, drawn, torch.zeros_like(drawn))


class Subject:
    """An operator at one size, its inputs drawn once; optional inputs are left out, unless the benchmark names them."""

    def __init__(self, op: Op, entry: BenchCase, device: str) -> None:
        self.op, self.entry, self.device, self.name = op, entry, device, op.name
        given: dict[str, Any] = entry.build(dtype=entry.dtype, device=device, seed=0, make=MakeThere)
        given |= dict.fromkeys(name for name in op.optional if name not in entry.optional)
        self.turns = {name: given[name].unbind(0) for name in entry.rotated}
        self.turn = 0
        given |= {name: values[0] for name, values in self.turns.items()}
        self.tensors: dict[str, Tensor | None] = {name: given.get(name) for name in op.inputs}
        self.options: Options = {name: given[name] for name in op.options}
        self.grads = op.grads

    def fresh_leaves(self) -> dict[str, Tensor | None]:
        """The tensors as leaves of a graph of their own (the memory is shared)."""
        return {
            name: None if t is None else t.detach().requires_grad_(name in self.grads and t.is_floating_point())
            for name, t in self.tensors.items()
        }

    def in_turn(self, tensors: Tensors, call: Callable[[dict[str, Tensor | None]], T]) -> Callable[[], T]:
        """call(tensors), at each call with the next of the inputs that rotate; `rewind` goes back to the first."""
        fixed = dict(tensors)
        if not self.turns:
            return lambda: call(fixed)

        def in_turn() -> T:
            turn = {name: values[self.turn % len(values)] for name, values in self.turns.items()}
            self.turn += 1
            return call(fixed | turn)

        return in_turn

    def copy(self) -> Subject:
        """The same numbers in memory of their own."""
        return Subject(self.op, self.entry, self.device)

    def rewind(self) -> None:
        self.turn = 0

    @property
    def decoding(self) -> bool:
        """Latency rather than bandwidth: timed without gradients, in a CUDA graph where there is one."""
        return self.entry.backward_bytes is None and self.entry.name.startswith("decode")

    @property
    def timed_backward(self) -> bool:
        return bool(self.grads) and self.entry.backward_bytes is not None and not self.decoding

    def reference(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        """The visible results in plain torch, as a function that torch.compile can take whole."""
        forward, options = self.op.reference.forward, self.options
        visible = [self.op.results.index(name) for name in self.op.outputs]

        def reference(tensors: Tensors) -> tuple[Tensor, ...]:
            results = forward(*tensors.values(), **options)
            return tuple(results[i] for i in visible)

        return reference

    def choose(self, backend: str) -> str:
        """The backend that will run; raises with the reason when it cannot."""
        return self.op.choose(backend, tuple(self.tensors.values()), self.options)

    def ours(self, backend: str) -> Variant:
        """The public operator: what a user calls."""
        tensors = self.fresh_leaves()
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        call = self.in_turn(tensors, lambda given: self.op(*given.values(), backend=backend, **self.options))
        return Variant(OURS, call, leaves, backend)

    @torch.no_grad()
    def golden(self) -> Tensor:
        """The first result of the float64 reference on the very inputs that are timed, or the first rows of it."""
        wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in self.tensors.items()}
        return self.reference()(wide)[0]

    def target(self, backend: str) -> Target:
        return op_target(self.op, backend, device=self.device, dtype=self.entry.dtype)


class ModuleSubject(Subject):
    """A module made of several operators, timed as a model calls it. benchmarks/ of the repository has some."""

    def __init__(self, entry: BenchCase, device: str) -> None:
        raise NotImplementedError

    @classmethod
    def entries(cls) -> list[BenchCase]:
        raise NotImplementedError


class Peer(Protocol):
    """Another way to compute a subject, by another library. benchmarks/peers of the repository has them."""

    NAME: str

    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""

    def prepare(self, subject: Subject) -> Variant | None:
        """The subject as this peer computes it; None where the peer does not offer the operator."""
