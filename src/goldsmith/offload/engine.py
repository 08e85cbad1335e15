"""Engine: computes a model's experts on the CPU, after a copy to the device, or from the device's cache."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..core import native
from ..core.autograd import as_stored
from ..core.deprecation import renamed_argument
from .adapters import EngineAdapters, Layers
from .calibration.calibration import Calibration
from .decoding.recording import recorded
from .engine_inputs import calibration_for, static_experts
from .engine_lock import EngineLock
from .engine_reports import EngineReports
from .guard.faults import Faults
from .guard.guard import Guard
from .lanes.call_checks import check_call, count_tokens
from .lanes.device_lanes import DeviceLanes
from .lanes.direct import MOST_TOKENS, DirectCalls, StepCalls
from .lanes.host_lanes import HostLanes
from .lanes.kernels import kernel_dtype
from .lanes.slot_filling import following_layer
from .lanes.slot_memory import SlotMemory, divided_budget
from .memory.cache import Cache, counts_of
from .memory.machine import CudaMachine
from .observe.statistics import Counts
from .observe.trace import Trace
from .planning.adaptation import AdaptiveCosts
from .planning.assignment import PREFILL, Assignment, assign
from .planning.call import Call
from .settings import OP, check_store, int8_group, pickling_error, settings
from .store.expert_store import ExpertStore

_AS_IT_IS = nullcontext()


class Engine(EngineReports):
    """y[t] = sum over j of weights[t, j] * expert ids[t, j] of x[t]: the experts of a store, on several lanes at once

    device        "auto" (cuda if there is one), "cuda:N", or "cpu", where all lanes use one kernel
    gpu_budget    "auto", bytes, or "6GiB", "6GB", "500MiB": all device memory that the engine takes, allocated at the
                  start and never grown. 0, or too little for two slots: everything runs on the CPU
    cache         which experts stay on the device, per layer: "lru", "lfu", "static" (needs profile=), "none"
    prefill       how calls of more than 16 tokens run: "auto", "cpu", "stream", "split"; or the token count from which
                  whole layers are streamed
    exact         True refuses a store whose format does not hold the weights exactly
    guard         on NaN or Inf: "raise", "warn" (once per layer and cause) or "off". Values are never replaced
    lanes         "auto"; or forced, for checks: "cpu", "copied", "cached", "mixed" (expert mod 3: cpu, copied, cached)
    threads       of the CPU's pool; default: the processors that the process may use (affinity, quota), one less with
                  a GPU
    calibration   a Calibration or its file; default: `calibrate`, if the plan needs it
    profile       the result of Engine.profile(), or its file, for cache="static"
    adaptive      True: timings of the running program correct the calibrated costs, so the same calls may give
                  different bits. False: the plan depends only on the calls and the calibration
    compute       of experts on the CPU: "exact", float products, or "int8", for stores in int8, int4 and int4_asym: x
                  and h are rounded to 8 bits; "auto" is exact
    adapters      {name: {layer: LayerLora}}: LoRA that `set_adapter` selects by name; the first one is active

    `engine(layer, x, top_k_index, top_k_weights)` computes one call. For inference only; calls from several threads run
    one at a time. A context manager; `close()` ends its threads and frees its memory. On a GPU a call may return before
    it is finished; the next call, `flush()`, `stats()` or `close()` then raises what the guard finds in it. Invalid
    arguments raise ValueError or TypeError with the keyword's name.
    """

    def __init__(
        self,
        store: ExpertStore,
        *,
        device: str | torch.device = "auto",
        gpu_budget: str | int = "auto",
        cache: str = "lru",
        prefill: str | int = "auto",
        exact: bool = True,
        guard: str = "raise",
        lanes: str = "auto",
        threads: int | None = None,
        calibration: Calibration | str | Path | None = None,
        profile: Mapping[str, object] | str | Path | None = None,
        adaptive: bool = False,
        compute: str = "exact",
        adapters: Mapping[str, Layers] | None = None,
    ) -> None:
        self.settings = settings(
            device=device, gpu_budget=gpu_budget, cache=cache, prefill=prefill, guard=guard, lanes=lanes,
            threads=threads, adaptive=adaptive, compute=compute,
        )  # fmt: skip
        check_store(store, exact)
        self.store = store
        self.device = self.settings.device
        self.threads = self.settings.threads
        chosen = static_experts(store, self.settings, profile)
        self.adapters = EngineAdapters(store, adapters, self.device)
        self.spending = divided_budget(store, self.settings, self._row_bytes(), self.adapters.nbytes)
        self.calibration, locked = calibration_for(store, self.settings, self.spending, calibration, Engine)
        self._costs = getattr(self.calibration, "costs", None)
        self._adapting = AdaptiveCosts(self._costs) if self._costs is not None and self.settings.adaptive else None
        self._tallies: defaultdict[int, Counts] = defaultdict(Counts)
        self._faults, self._trace, self.steps = Faults(store), Trace(), []
        self._lock, self._number, self._positions = EngineLock(), 0, 0
        self._assign = assign  # benchmarks set other rules here
        self._guard = Guard(store, self._faults, self.settings.guard)
        self._entry = torch.compiler.disable(
            Engine._call
        )  # created here because it imports torch's compiler, which takes a second
        # a GPU's flags are read one call later; without a device lane the whole call runs on the host
        self._deferred = self.device.type == "cuda" and self.spending.device_lane
        self._on_host = (
            self.device.type == "cuda" and not self._deferred
        )  # no memory on the GPU, so x is copied to the host
        self._lanes = self._allocate(chosen)
        self.direct = self._direct_calls()
        self._transport, self._runs_ahead = self._lanes.transport, self._lanes.runs_ahead
        if self.adapters.names:
            self.set_adapter(self.adapters.names[0])
        del locked  # the machine holds the page lock that the calibration took

    # -- a call -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        layer: int,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """out[t] = sum over j = 0..k-1, in this order, of top_k_weights[t, j] * expert top_k_index[t, j] of x[t]

        x [T, H] in float32, bfloat16 or float16, top_k_index [T, k] in int32 or int64, top_k_weights [T, k] in any of
        these float dtypes -> a fresh [T, H] in x's dtype. Rows and their sum are float32; the sum is rounded once. An
        index of -1 or E stands for no expert, and its weight is not read.

        Raises RoutingError for another index out of range, before any lane starts; NumericsError for NaN and Inf
        (guard="raise"); ShapeError, TypeError, ValueError; KeyError for a layer that the store does not have.
        """
        if torch.compiler.is_compiling():
            return self._entry(self, layer, x, top_k_index, top_k_weights)
        if (experts := recorded(self)) is not None:
            return experts.call(layer, x, top_k_index, top_k_weights)
        return self._call(layer, x, top_k_index, top_k_weights)

    def _call(self, layer: int, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        begin = time.perf_counter()
        self._check()
        experts = self.store.num_experts(layer)
        check_call(layer, x, top_k_index, top_k_weights, self.store.hidden_size, self.device)
        x, top_k_index, top_k_weights = as_stored((x, top_k_index, top_k_weights))
        if self._on_host:
            x, top_k_index, top_k_weights = x.cpu(), top_k_index.cpu(), top_k_weights.cpu()
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            out = self._lock.take(self._locked_call, begin, experts, layer, x, top_k_index, top_k_weights)
        return out.to(self.device) if self._on_host else out

    def _locked_call(
        self, begin: float, experts: int, layer: int, x: Tensor, index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        if self.direct is not None and x.shape[0] <= MOST_TOKENS and not self.watched:
            out = self.direct.run(self._number + 1, self._positions, layer, x, index, top_k_weights)
            if out is not None:
                self._number += 1
                return out
        ids, counts, skips = self._count_routes(layer, index, x, experts)
        begin = max(begin, self._lanes.until)  # the time until then was counted for the call before
        assignment = self._begin_early(layer, x, ids, counts)
        tally = self._tallies[layer]
        weights = top_k_weights if self._deferred else top_k_weights.float()  # a GPU's merge reads any dtype
        if skips:
            weights = weights.masked_fill(ids.to(weights.device) < 0, 0.0)
        self._number += 1
        if self._faults.on:
            x, weights = self._faults.apply_to_inputs(layer, self._number, x, weights)
        bound = tally.bound
        try:
            out = self._pieces(layer, x, ids, weights, counts, tally, assignment)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{OP}: {self.device} ran out of memory in a call of {len(x)} tokens in layer {layer}; lower "
                f"gpu_budget, to leave more memory for the rest of the model, or give shorter prompts: {error}"
            ) from error
        end = self._lanes.returned = time.perf_counter()
        if tally.bound > bound:
            tally.t_bound += end - begin
        tally.calls += 1
        tokens = x.shape[0]
        tally.tokens += tokens
        tally.prefill_calls += tokens > PREFILL
        tally.t_wall += end - begin
        if self._trace.on:
            self._trace.span("call", f"layer {layer}", begin, end, layer=layer, tokens=tokens)
        return out

    def step_calls(self, layers: tuple[int, ...], tokens: int, k: int, dtype: torch.dtype) -> StepCalls:
        """Buffers and arguments of the experts' calls of a native step over these layers, for up to so many tokens."""
        self._check()
        if not isinstance(self._lanes, HostLanes):
            raise RuntimeError(f"{OP}: a native step needs an engine on the CPU, but this one is on {self.device}")
        calls = StepCalls.of(self.store, self._lanes, layers, tokens, k, dtype)
        if self.direct is not None:
            self.direct.add(calls)
        return calls

    def step(self, calls: StepCalls, run: Callable[[], None]) -> None:
        """Runs a native step over these calls of the experts, and raises what the guard finds in them."""
        self._check()
        self._lock.take(self._step, calls, run)

    def _step(self, calls: StepCalls, run: Callable[[], None]) -> None:
        if self.direct is None or self.watched:
            raise RuntimeError(f"{OP}: a step cannot be computed while faults are injected or a trace is recorded")
        self._number += 1
        self.direct.step(self._number, calls, run)

    @property
    def watched(self) -> bool:
        """Whether every call must be seen alone: faults are injected, or a trace is recorded."""
        return self._faults.on or self._trace.on

    def set_adapter(self, names: str | Sequence[str] | None) -> None:
        """From the next call on, the experts use these adapters: one, the sum of several, or none."""
        self._check()
        self._lock.take(self._use, names)

    def _use(self, names: str | Sequence[str] | None) -> None:
        self._lanes.flush()  # what was computed with other adapters is also judged with them
        lora = self._faults.lora = self.adapters.choose(names)
        self._lanes.use(lora)

    def begin_forward(self, batch: int, positions: int) -> None:
        """Begins a model's forward: until its end, tokens are batch x positions, and reports name both."""
        self._positions = positions
        self._guard.begin()

    @renamed_argument("made", "output")
    def end_forward(self, output: Tensor | None = None) -> None:
        """Ends a model's forward: raises what the guard found in its last layers, and in `output` [rows, any]."""
        self._positions = 0
        self.flush()
        self._guard.check_output(output, self._number)

    def _count_routes(self, layer: int, index: Tensor, x: Tensor, experts: int) -> tuple[Tensor, list[int], bool]:
        """ids [T, k] on the host with -1 for skipped routes, tokens of each expert, and whether a route is skipped."""
        lanes = self.settings.lanes
        alone = self._caches[layer].holds >= experts if lanes == "auto" else lanes in ("copied", "cached")
        ids = self._lanes.to_host(index, x, alone)
        counts, skips = count_tokens(layer, ids, experts)
        if skips:
            there = ids.numpy()
            ids = torch.from_numpy(np.where(there == experts, -1, there))
        return ids.contiguous(), counts, skips

    def _begin_early(self, layer: int, x: Tensor, ids: Tensor, counts: list[int]) -> Assignment | None:
        """The assignment of a call of one token, whose CPU work begins here, beside the rest; otherwise None."""
        lanes, assignment = self._lanes, None
        if not isinstance(lanes, DeviceLanes):
            return None
        if x.shape[0] == 1 and ids.shape[1] <= lanes.most_rows:
            assignment = self._assign(counts, 1, self._caches[layer], self.settings, self.spending, self._costs)
            if assignment.cpu and not self._faults.on:
                lanes.cpu.begin_early(layer, x, assignment.cpu, counts)
        lanes.look_back()
        return assignment

    def _pieces(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, counts: list[int], tally: Counts,
        assignment: Assignment | None,
    ) -> Tensor:  # fmt: skip
        """Computes the call in as many pieces as the workspace requires; mostly one."""
        step = max(1, self._lanes.most_rows // max(1, ids.shape[1]))
        if x.shape[0] <= step:
            return self._piece(layer, x, ids, weights, counts, tally, 0, assignment)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for first in range(0, len(x), step):
            at = slice(first, first + step)
            counts, _ = count_tokens(layer, ids[at], len(counts))
            out[at] = self._piece(layer, x[at], ids[at], weights[at], counts, tally, first)
        return out

    def _piece(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, counts: list[int], tally: Counts, first: int,
        assignment: Assignment | None = None,
    ) -> Tensor:  # fmt: skip
        cache = self._caches[layer]
        if assignment is None:
            assignment = self._assign(counts, x.shape[0], cache, self.settings, self.spending, self._costs)
        cache.used(counts_of(counts))
        to = x.contiguous() if self._deferred else x.to(kernel_dtype(x.dtype)).contiguous()
        call = Call(layer, self._number, x, to, ids, weights, counts, assignment, cache, tally, first)
        call.positions = self._positions
        call.following = following_layer(self.store, self._caches, layer) if assignment.streamed else None
        before = tally.t_cpu, tally.t_link, tally.bytes_h2d
        try:
            outcome = self._lanes.run(call)
        except BaseException:
            self._after_failure(cache, assignment)
            raise
        call.count()
        if self._adapting is not None:
            copies = (tally.bytes_h2d - before[2]) // self.spending.slot_bytes
            expected = assignment.times.get("cpu", 0.0) if not assignment.streamed else 0.0
            self._adapting.learn(expected, tally.t_cpu - before[0], copies, tally.t_link - before[1])
            self._costs = self._adapting.costs
        if self.settings.guard != "off" and not self._deferred:
            self._guard.look(call, outcome)
        return outcome.out

    def _after_failure(self, cache: Cache, assignment: Assignment) -> None:
        """Forgets the contents of caches and arenas after a lane raised."""
        for expert in (*assignment.cached, *assignment.copied, *assignment.uploads):
            cache.forget(expert)
        if self._lanes.streaming is not None:
            self._lanes.streaming.forget()

    def _check(self) -> None:
        self._lock.check()
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{OP}: it cannot be captured in a CUDA graph, because the CPU decides at every call which lane "
                "computes an expert; capture the work between the calls"
            )

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._lock.closed

    def close(self) -> None:
        """Ends the engine's threads and frees its memory. May be called twice.

        Raises errors of the last call that were not raised yet: of the CPU lane, or from the guard (guard="raise"). In
        a `finally` such an error has the current exception as its __context__. At the end of a `with` block the block's
        own exception wins, and carries the other as a note. Inside a call of the same thread, for example in a signal
        handler, the engine closes when that call ends.
        """
        self._lock.close(self._end)

    def _end(self) -> None:
        try:
            for step in list(self.steps):
                step.close()
            self._lanes.close()
        finally:
            del self._lanes  # the lanes still refer to the arenas
            self.adapters.close()
            self._memory.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._lock.close(self._end, value)

    def __reduce__(self) -> NoReturn:
        raise pickling_error()

    def __repr__(self) -> str:
        return f"Engine({self.store!r}, device={str(self.device)!r}, lanes={self.settings.lanes!r})"

    def _row_bytes(self) -> int:
        """Bytes of a route in a GPU's workspace: its row, h, its entries in lists, and what adapters need."""
        if self.device.type != "cuda":
            return 0
        return 4 * (self.store.hidden_size + self.store.intermediate_size) + 24 + self.adapters.row_bytes

    def _allocate(self, chosen: Mapping[int, list[int]]) -> HostLanes | DeviceLanes:
        memory = self._memory = SlotMemory(self.store, self.settings, self.spending, chosen)
        self._arenas, self._caches = memory.arenas, memory.caches
        of_all = (self.threads, self.settings.lanes == "auto", self._faults, self._trace, self._tallies.__getitem__)
        machine = self._machine()
        if machine is None:
            int8 = int8_group(self.store, self.settings.compute)
            return HostLanes(self.store, memory.ring, memory.streaming, *of_all, int8)
        self.adapters.allocate(self.device, self.spending.rows)
        look = None if self.settings.guard == "off" else self._guard.look
        options = look, not self.settings.adaptive  # adaptive costs learn from the times at a call's end
        return DeviceLanes(self.store, machine, self.spending, memory.ring, memory.streaming, *of_all, *options)

    def _direct_calls(self) -> DirectCalls | None:
        """Direct calls, if every expert is always computed on the CPU, with the native library."""
        lanes = self._lanes
        if not isinstance(lanes, HostLanes) or native.reason() is not None or self._adapting is not None:
            return None
        if self.spending.device_lane and self.settings.lanes != "cpu":
            return None
        guard = None if self.settings.guard == "off" else self._guard
        return DirectCalls(self.store, lanes, self._caches, guard, self._tallies)

    def _machine(self) -> CudaMachine | None:
        return CudaMachine(self.store, self.device) if self._deferred else None
