"""The overhead of an Engine's call in addition to the work of its lanes: caller's thread, waits, launches, merge."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..memory.budget import SPARE
from ..memory.transport import free_memory as free_on_host
from ..observe.statistics import Counts
from ..settings import free_memory
from ..store.expert_store import ExpertStore

_TOGETHER = 8  # experts of a call
_SLOTS = 48  # slots on the device besides one per layer: enough for all copies
_CALLS, _LEAST = 12, 3  # most calls per sample, and fewest samples
_PROMPTS = (128, 1024)  # tokens of calls whose x does not come to the CPU with the ids
# lanes= and the experts of its calls; with "mixed", expert 0 is computed on the CPU and 2 is cached
_WAYS = {"cpu": ("cpu", None), "link": ("copied", None), "device": ("cached", [0]), "split": ("mixed", [0, 2])}


class TimedEngine(Protocol):
    """The part of Engine that is timed."""

    @property
    def store(self) -> ExpertStore: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def runs_ahead(self) -> bool: ...
    def __call__(self, layer: int, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor: ...
    def flush(self) -> None: ...
    def stats(self) -> Counts: ...
    def reset_stats(self) -> None: ...


EngineFactory: TypeAlias = Callable[..., AbstractContextManager[TimedEngine]]  # the class Engine


def overheads(
    store: ExpertStore, make: EngineFactory, device: torch.device, threads: int, seconds: float, expert_seconds: float,
    token_seconds: float = math.inf,
) -> dict[str, float]:  # fmt: skip
    """{way: seconds} of the overhead of a call, within `seconds` for all ways together

    "cpu"     a call of one token, minus the CPU's kernel
    "link"    a call of one token, minus its copies
    "device"  a call whose one expert is on the device
    "split"   a call with one expert on the CPU and one on the device. If the caller does not wait for the CPU: the
              caller's own work, while the CPU's threads compute half of the experts and use the same memory
    "route"   each further route of a prompt, minus the CPU's kernel: its numbers travel there and back

    expert_seconds: an expert on the CPU, token_seconds: each of many tokens; slow experts are timed in fewer numbers.
    Returns {} if the device has no room, no "split" for fewer than three experts, and no "route" if the CPU is too slow
    for it to matter.
    """
    layer = max(store.layers, key=store.num_experts)
    experts = store.num_experts(layer)
    share = seconds / len(_WAYS)
    together = max(1, min(_TOGETHER, experts, int(share / (4 * _LEAST * expert_seconds))))
    overhead: dict[str, float] = {}
    try:
        for way, (lanes, ids) in _WAYS.items():
            if ids is not None and max(ids) >= experts:
                continue
            # an expert is computed while the next one is copied, except the last one; on a CPU, after its copy
            k = 1 if way == "link" and device.type == "cpu" else together
            turns = [ids] if ids else [[(i + turn * k) % experts for i in range(k)] for turn in range(_CALLS)]
            options: dict[str, object] = {"lanes": lanes, "threads": threads, "gpu_budget": _budget(store, device)}
            with make(store, device=device, exact=False, guard="off", **options) as engine:
                own = way == "split" and engine.runs_ahead
                times = (
                    _split_call_seconds(engine, layer, together, share)
                    if own
                    else _call_seconds(engine, layer, turns, way, share)
                )
                overhead[way] = statistics.median(times)
                if way == "cpu" and _PROMPTS[-1] * token_seconds < share / 4:
                    few, many = (
                        min(_call_seconds(engine, layer, [[0]], way, share / 2, tokens)) for tokens in _PROMPTS
                    )
                    overhead["route"] = max(0.0, many - few) / (_PROMPTS[-1] - _PROMPTS[0])
    except (ValueError, MemoryError):
        return {}
    return overhead


def _budget(store: ExpertStore, device: torch.device) -> int:
    slots = _SLOTS + len(store.layers)
    free = free_on_host() if device.type == "cpu" else free_memory(device)
    needed = 2 * slots * max(store.expert_nbytes(layer) for layer in store.layers) + 2 * SPARE
    return needed if free is None else min(needed, free // 2)


def _split_call_seconds(engine: TimedEngine, layer: int, together: int, seconds: float) -> list[float]:
    """Seconds of the caller in calls of one token, with half the experts on the CPU and half in the cache."""
    experts, half = engine.store.num_experts(layer), max(1, together // 2)
    on_cpu, cached = range(0, experts, 3), range(2, experts, 3)[:half]  # as lanes="mixed" assigns them
    turns = [[*(on_cpu[(turn * half + i) % len(on_cpu)] for i in range(half)), *cached] for turn in range(_CALLS)]
    x, ids, weights = _inputs(engine, turns, 1)
    times, begin = list[float](), time.perf_counter()
    with torch.no_grad():
        while len(times) < _CALLS or time.perf_counter() - begin < seconds:
            engine.flush()
            before = time.perf_counter()
            engine(layer, x, ids[len(times) % len(ids)], weights)
            times.append(time.perf_counter() - before)
    return times


def _inputs(engine: TimedEngine, turns: list[list[int]], tokens: int) -> tuple[Tensor, list[Tensor], Tensor]:
    store, device = engine.store, engine.device
    dtype = torch.bfloat16 if store.dtype == torch.bfloat16 else torch.float32
    x = torch.randn(tokens, store.hidden_size, dtype=torch.float32, device="cpu").to(device, dtype)
    ids_of_turns = [torch.tensor([ids] * tokens, device=device) for ids in turns]
    return x, ids_of_turns, torch.full(ids_of_turns[0].shape, 1 / len(turns[0]), dtype=torch.float32, device=device)


def _call_seconds(
    engine: TimedEngine, layer: int, turns: list[list[int]], way: str, seconds: float, tokens: int = 1
) -> list[float]:
    """Seconds per call, for several samples."""
    x, ids, weights = _inputs(engine, turns, tokens)

    def sample(calls: int) -> float:
        engine.reset_stats()
        begin = time.perf_counter()
        for i in range(calls):
            engine(layer, x, ids[i % len(ids)], weights)
        engine.flush()
        spent, stats = time.perf_counter() - begin, engine.stats()
        return (spent - {"cpu": stats.t_cpu, "link": stats.t_link}.get(way, 0.0)) / calls

    with torch.no_grad():
        sample(1)  # compiles
        begin = time.perf_counter()
        sample(1)
        calls = max(1, min(_CALLS, int(seconds / (2 * _LEAST * (time.perf_counter() - begin)))))
        until, times = begin + seconds, list[float]()
        while len(times) < _LEAST or time.perf_counter() < until:
            times.append(sample(calls))
    return times
