"""Calls of few tokens whose experts all run on the CPU: one native call computes rows, flags and weighted sums.

Between the router's result and the native call there are only a check of the ids and a few counters: an engine with one
lane has nothing to plan, and nothing to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from ctypes import Array, c_int32
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..guard.guard import Guard
from ..memory.cache import Cache, counts_of
from ..observe.statistics import Counts
from ..planning.assignment import Assignment
from ..planning.call import Call, Outcome
from ..store.expert_store import ExpertStore
from .call_checks import FEW, count_tokens
from .host_lanes import HostLanes
from .kernels import kernel_dtype

if TYPE_CHECKING:
    from ...experts._native_abi import NativeCall

MOST_TOKENS = 8
_FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Buffers(NamedTuple):
    """The tensors of one call: x [T, H], ids and weights [T, k], rows [T k, H], flags [T k], y [T, H] in x's dtype."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    rows: Tensor
    flags: Tensor
    y: Tensor

    def first(self, tokens: int) -> Buffers:
        """The buffers of a call of fewer tokens, in the same memory."""
        routes = tokens * self.ids.shape[1]
        x, ids, weights, rows, flags, y = self
        return Buffers(x[:tokens], ids[:tokens], weights[:tokens], rows[:routes], flags[:routes], y[:tokens])


@dataclass(eq=False)
class StepCalls:
    """The experts' calls of a step over several layers: their buffers, arguments and counters, which the native step
    fills

    room      tokens that the buffers hold; tokens, buffers: of the next step
    teams     [layers]: threads for each number of tokens, from 1 on
    uses      [layers, E]: steps that used each expert
    counted   tokens of all steps
    """

    layers: tuple[int, ...]
    room: int
    whole: list[Buffers]
    native: list[NativeCall]
    teams: list[list[int]]
    uses: Tensor
    results: Array[Any] | None = None  # a StepLayer for each layer
    steps: int = 0
    counted: int = 0
    tokens: int = 0
    buffers: list[Buffers] = field(default_factory=list)

    @classmethod
    def of(
        cls, store: ExpertStore, lanes: HostLanes, layers: tuple[int, ...], tokens: int, k: int, dtype: torch.dtype
    ) -> StepCalls:
        """Buffers and arguments for steps of up to this many tokens with k experts each."""
        all_buffers, calls = [], []
        with torch.inference_mode(False):
            for layer in layers:
                x = torch.zeros(tokens, store.hidden_size, dtype=dtype, device="cpu")
                ids = torch.zeros(tokens, k, dtype=torch.int64, device="cpu")
                weights = torch.zeros(tokens, k, **_FLOAT)
                buffers = Buffers(x, ids, weights, *_row_buffers(store, tokens * k), torch.zeros_like(x))
                all_buffers.append(buffers)
                calls.append(lanes.step_call(layer, buffers))
            most = max(store.num_experts(layer) for layer in layers)
            uses = torch.zeros(len(layers), most, dtype=torch.int64, device="cpu")
            teams = [[lanes.team(layer, count * k) for count in range(1, tokens + 1)] for layer in layers]
        return cls(layers, tokens, all_buffers, calls, teams, uses)

    def resize(self, tokens: int) -> None:
        """The next steps have this many tokens, at most `room`."""
        self.tokens, self.buffers = tokens, [buffers.first(tokens) for buffers in self.whole]
        for call, teams in zip(self.native, self.teams, strict=True):
            call.args.tokens, call.args.threads = tokens, teams[tokens - 1]


class DirectCalls:
    """The calls of an engine whose only lane is the CPU's."""

    def __init__(
        self, store: ExpertStore, lanes: HostLanes, caches: Mapping[int, Cache], guard: Guard | None,
        tallies: Mapping[int, Counts],
    ) -> None:  # fmt: skip
        self._store, self._lanes, self._caches, self._guard, self._tallies = store, lanes, caches, guard, tallies
        self._finite = c_int32()
        self._steps: list[StepCalls] = []
        self._rows, self._flags = _row_buffers(store, 0)

    def run(self, number: int, positions: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor | None:
        """The call's result; None if it skips a route, has none, or more than are counted in Python."""
        begin = time.perf_counter()
        routes = ids.numel()
        if not 0 < routes <= FEW:
            return None
        counts, skips = count_tokens(layer, ids, self._store.num_experts(layer))
        if skips:
            return None
        if len(self._rows) < routes:
            self._rows, self._flags = _row_buffers(self._store, routes)
        inner = x.to(kernel_dtype(x.dtype)).contiguous()
        y = torch.empty_like(inner)
        buffers = Buffers(inner, ids, weights.float().contiguous(), self._rows[:routes], self._flags[:routes], y)
        self._lanes.merged(layer, buffers, self._finite)
        out = y if y.dtype == x.dtype else y.to(x.dtype)
        used = counts_of(counts)
        self._caches[layer].used(used)
        if self._guard is not None:
            finite = bool(self._finite.value) and (out is y or bool(torch.isfinite(out).all()))
            self._judge(layer, number, positions, x, buffers, counts, out, finite)
        tally, end = self._tallies[layer], time.perf_counter()
        _count(tally, 1, len(x), len(used), self._store.expert_nbytes(layer), end - begin)
        self._lanes.returned = end
        return out

    def add(self, calls: StepCalls) -> None:
        self._steps.append(calls)

    def step(self, number: int, calls: StepCalls, run: Callable[[], None]) -> None:
        """Runs a step and judges its layers."""
        run()
        calls.steps += 1
        calls.counted += calls.tokens
        if self._guard is None or calls.results is None:
            return
        for layer, buffers, result in zip(calls.layers, calls.buffers, calls.results):
            if not result.finite:
                counts, _ = count_tokens(layer, buffers.ids, self._store.num_experts(layer))
                self._judge(layer, number, 1, buffers.x, buffers, counts, buffers.y, False)

    def settle(self) -> None:
        """Adds what steps have counted to the engine's counters."""
        for calls in self._steps:
            self._add(calls)

    def drop(self, calls: StepCalls) -> None:
        self._add(calls)
        self._steps.remove(calls)

    def _add(self, calls: StepCalls) -> None:
        for i, (layer, result) in enumerate(zip(calls.layers, calls.results or ())):
            size = self._store.expert_nbytes(layer)
            _count(self._tallies[layer], calls.steps, calls.counted, result.distinct, size, result.seconds)
            self._caches[layer].add_uses(calls.uses[i].tolist())
            result.distinct, result.seconds = 0, 0.0
        calls.uses.zero_()
        calls.steps = calls.counted = 0

    def _judge(
        self, layer: int, number: int, positions: int, x: Tensor, of: Buffers, counts: list[int], out: Tensor,
        finite: bool,
    ) -> None:  # fmt: skip
        guard = self._guard
        if guard is None:
            return
        if finite:
            guard.passed(layer)
            return
        used = tuple(counts_of(counts))
        call = Call(
            layer, number, x, of.x, of.ids, of.weights, counts, Assignment(cpu=used), self._caches[layer],
            self._tallies[layer], positions=positions,
        )  # fmt: skip
        guard.look(call, Outcome(of.rows, of.flags, out), True)


def _row_buffers(store: ExpertStore, routes: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # the buffers are also written in calls outside inference mode
        rows = torch.empty(routes, store.hidden_size, **_FLOAT)
        return rows, torch.empty(routes, dtype=torch.uint8, device="cpu")


def _count(tally: Counts, calls: int, tokens: int, experts: int, size: int, seconds: float) -> None:
    tally.calls += calls
    tally.tokens += tokens
    tally.experts_cpu += experts
    tally.bytes_store_read += experts * size
    tally.t_cpu += seconds
    tally.t_wall += seconds
