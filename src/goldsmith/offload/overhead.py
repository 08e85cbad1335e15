"""What a call of the Engine takes beside its lanes' own work: the caller's thread, waits, launches, the merge."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .budget import SPARE
from .engine import Engine
from .store import ExpertStore

_TOGETHER = 8  # experts of a call
_SLOTS = 48  # of the device, beside one a layer: enough for all that copies ever go through
_CALLS, _LEAST = 12, 3  # calls of a sample, and samples


def overheads(store: ExpertStore, device: torch.device, threads: int, seconds: float) -> dict[str, float]:
    """Seconds of a call of one token beside the kernel of the CPU ("cpu"), beside its copies ("link"), and of a call
    whose one expert is on the device ("device")

    Each takes a third of `seconds`. Nothing where the device has no room for it.
    """
    slots = _SLOTS + len(store.layers)
    budget = 2 * slots * max(store.expert_nbytes(layer) for layer in store.layers) + 2 * SPARE
    budget = min(budget, torch.cuda.mem_get_info(device)[0] // 2)
    found: dict[str, float] = {}
    try:
        for name, lanes in (("cpu", "cpu"), ("link", "copied"), ("device", "cached")):
            asked: dict[str, Any] = {"lanes": lanes, "threads": threads, "gpu_budget": budget}
            with Engine(store, device=device, exact=False, guard="off", **asked) as engine:
                found[name] = _beside(engine, name, seconds / 3)
    except (ValueError, MemoryError):
        return {}
    return found


def _beside(engine: Engine, lane: str, seconds: float) -> float:
    store, device = engine.store, engine.device
    layer = max(store.layers, key=store.num_experts)
    experts = store.num_experts(layer)
    k = 1 if lane == "device" else min(_TOGETHER, experts)
    x = torch.randn(1, store.hidden_size).to(device, torch.bfloat16 if store.dtype == torch.bfloat16 else torch.float32)
    turns = [(torch.arange(k) + turn * k) % experts for turn in range(1 if lane == "device" else _CALLS)]
    given = [ids[None].to(device) for ids in turns]
    weights = torch.full((1, k), 1 / k, device=device)

    def sample() -> float:
        engine.reset_stats()
        begin = time.perf_counter()
        for i in range(_CALLS):
            engine(layer, x, given[i % len(given)], weights)
        engine.flush()
        spent, stats = time.perf_counter() - begin, engine.stats()
        return (spent - (0.0 if lane == "device" else getattr(stats, f"t_{lane}"))) / _CALLS

    with torch.no_grad():
        sample()  # compiles
        until, found = time.perf_counter() + seconds, list[float]()
        while len(found) < _LEAST or time.perf_counter() < until:
            found.append(sample())
    return statistics.median(found)
