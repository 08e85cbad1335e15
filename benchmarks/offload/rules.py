"""Other rules for our engine to assign experts to lanes; they show what calibration and overlap gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from goldsmith.offload.memory.cache import Cache, most_used_first
from goldsmith.offload.planning.assignment import Assignment
from goldsmith.offload.planning.costs import Costs

Rule = Callable[..., Assignment]
HALF = 0.5  # the CPU's share of the experts that are not on the device, under the fixed ratio


def _split(counts: Sequence[int], cache: Cache) -> tuple[tuple[int, ...], list[int]]:
    """The experts of a call on the device, and the others, most used first."""
    used, cached = [e for e, n in enumerate(counts) if n], cache.resident()
    return tuple(e for e in used if e in cached), most_used_first([e for e in used if e not in cached], counts)


def all_on_cpu(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    cached, missing = _split(counts, cache)
    return Assignment(cached=cached, cpu=tuple(missing))


def all_copied(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    cached, missing = _split(counts, cache)
    return Assignment(cached=cached, copied=tuple(missing))


def fixed_ratio(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    """The CPU computes the same share at every call, the least used experts; lanes overlap."""
    cached, missing = _split(counts, cache)
    copied = len(missing) - round(HALF * len(missing))
    return Assignment(cached=cached, copied=tuple(missing[:copied]), cpu=tuple(missing[copied:]))


def fiddlers_cpu(counts: Sequence[int], cached: frozenset[int], costs: Costs) -> set[int]:
    """The experts that Fiddler's rule leaves to the CPU: each goes where it alone is quicker (arXiv 2402.07033)."""
    copy, chosen = costs.link_latency + costs.expert_bytes / costs.link_bytes_per_s, set[int]()
    for e, n in enumerate(counts):
        if not n or e in cached:
            continue
        cpu = costs.cpu_latency + np.interp(n, *costs.cpu)
        if cpu <= copy + costs.device_latency + np.interp(n, *costs.device):
            chosen.add(e)
    return chosen


def parts(ids: Tensor, chosen: set[int], experts: int) -> tuple[Tensor, Tensor]:
    """(ids of the chosen experts, ids of the others), each with -1 in place of the rest."""
    table = torch.zeros(experts, dtype=torch.bool, device=ids.device)
    table[sorted(chosen)] = True
    mine = table[ids]
    return torch.where(mine, ids, -1), torch.where(mine, -1, ids)
