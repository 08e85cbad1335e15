"""A subject is an operator, or a module of several, at one size; variants are the ways to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

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
Drawn = dict[str, Tensor | None]
Options = dict[str, Any]  # numbers, words and flags, by an operator's option names
Call = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A call that needs another call before it; that one is not timed."""

    before: Call
    call: Call

    def __call__(self) -> object:
        self.before()
        return self.call()


@dataclass
class Variant:
    """One way to compute a subject.

    forward      returns the visible results, differentiable in `leaves`
    comparable   False for a peer that computes another model at the same cost: its error would mean nothing
    gradients    makes the backward call, where autograd does not compute it
    """

    peer: str
    forward: Callable[[], Tensor | tuple[Tensor, ...] | list[Tensor]]
    leaves: list[Tensor]
    backend: str = ""
    note: str = ""
    comparable: bool = True
    gradients: Callable[[], Call] | None = None

    def results(self) -> tuple[Tensor, ...]:
        out = self.forward()
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    def backward(self) -> Call:
        """A repeatable call for the gradients of all leaves; the graph is built once, before timing."""
        if self.gradients is not None:
            return self.gradients()
        results = [r for r in self.results() if r.requires_grad]
        generator = torch.Generator(device=results[0].device).manual_seed(1)
        grads = [torch.randn(r.shape, generator=generator, dtype=r.dtype, device=r.device) for r in results]
        return lambda: torch.autograd.grad(results, self.leaves, grads, retain_graph=True, allow_unused=True)


class MakeThere(Make):
    """Draws on the device that times: on a CPU, streams of 8192 tokens of 4 x 7168 take seconds to draw."""

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
    """An operator at one size with inputs drawn once; optional inputs are None unless the case names them."""

    def __init__(self, op: Op, entry: BenchCase, device: str) -> None:
        self.op, self.entry, self.device, self.name = op, entry, device, op.name
        inputs: dict[str, Any] = entry.build(dtype=entry.dtype, device=device, seed=0, make=MakeThere)
        inputs |= dict.fromkeys(name for name in op.optional if name not in entry.optional)
        self.turns = {name: inputs[name].unbind(0) for name in entry.rotated}
        self.turn = 0
        inputs |= {name: values[0] for name, values in self.turns.items()}
        self.tensors: Drawn = {name: inputs.get(name) for name in op.inputs}
        self.options: Options = {name: inputs[name] for name in op.options}
        self.grads = op.grads

    def fresh_leaves(self) -> Drawn:
        """The tensors as leaves of a new graph; they share memory with the originals."""
        return {
            name: None if t is None else t.detach().requires_grad_(name in self.grads and t.is_floating_point())
            for name, t in self.tensors.items()
        }

    def in_turn(self, tensors: Tensors, call: Callable[[dict[str, Tensor]], T]) -> Callable[[], T]:
        """A function that calls `call` with these tensors, each time with the next of the inputs that rotate.

        `rewind` goes back to the first.
        """
        fixed = cast(dict[str, Tensor], dict(tensors))  # optional inputs may be None
        if not self.turns:
            return lambda: call(fixed)

        def in_turn() -> T:
            turn = {name: values[self.turn % len(values)] for name, values in self.turns.items()}
            self.turn += 1
            return call(fixed | turn)

        return in_turn

    def copy(self) -> Subject:
        """The same numbers in other memory."""
        return Subject(self.op, self.entry, self.device)

    def rewind(self) -> None:
        """Go back to the first of the inputs that rotate."""
        self.turn = 0

    @property
    def decoding(self) -> bool:
        """Whether the case measures latency: it is timed without gradients, on a GPU also in a CUDA graph."""
        return self.entry.backward_bytes is None and self.entry.name.startswith("decode")

    @property
    def timed_backward(self) -> bool:
        return bool(self.grads) and self.entry.backward_bytes is not None and not self.decoding

    def reference(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        """The visible results in plain torch, as a function that torch.compile can compile whole."""
        forward, options = self.op.reference.forward, self.options
        visible = [self.op.results.index(name) for name in self.op.outputs]

        def reference(tensors: Tensors) -> tuple[Tensor, ...]:
            results = forward(*tensors.values(), **options)
            return tuple(results[i] for i in visible)

        return reference

    def choose(self, backend: str) -> str:
        """The backend that will run; raises BackendUnavailable with the reason where none can."""
        return self.op.choose(backend, tuple(self.tensors.values()), self.options)

    def ours(self, backend: str) -> Variant:
        """The public operator, as a user calls it."""
        tensors = self.fresh_leaves()
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        call = self.in_turn(tensors, lambda inputs: self.op(*inputs.values(), backend=backend, **self.options))
        return Variant(OURS, call, leaves, backend)

    @torch.no_grad()
    def golden(self) -> Tensor:
        """The first result of the float64 reference on the inputs that are timed, or its first rows."""
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
