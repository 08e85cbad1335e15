"""Other rules for which expert goes where, for our own engine: what calibration and overlap bring is the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ....offload.memory.cache import Cache, most_used_first
from ....offload.planning.assignment import Assignment
from ....offload.planning.costs import Costs

Rule = Callable[..., Assignment]
HALF = 0.5  # of the experts that are not on the device: the share of the CPU under a fixed ratio


def _split(counts: Sequence[int], cache: Cache) -> tuple[tuple[int, ...], list[int]]:
    """Experts of a call that are on the device, and the others, most used first."""
    used, held = [e for e, n in enumerate(counts) if n], cache.resident()
    return tuple(e for e in used if e in held), most_used_first([e for e in used if e not in held], counts)


def all_on_cpu(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    held, missing = _split(counts, cache)
    return Assignment(cached=held, cpu=tuple(missing))


def all_copied(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    held, missing = _split(counts, cache)
    return Assignment(cached=held, copied=tuple(missing))


def fixed_ratio(counts: Sequence[int], tokens: int, cache: Cache, *_: object) -> Assignment:
    """The same share on the CPU at every call, the least used of them; lanes overlap."""
    held, missing = _split(counts, cache)
    copied = len(missing) - round(HALF * len(missing))
    return Assignment(cached=held, copied=tuple(missing[:copied]), cpu=tuple(missing[copied:]))


def fiddlers_cpu(counts: Sequence[int], held: frozenset[int], costs: Costs) -> set[int]:
    """Experts that Fiddler's rule leaves to the CPU: each goes where it alone takes less time (arXiv 2402.07033)."""
    copy, chosen = costs.link_latency + costs.expert_bytes / costs.link_bytes_per_s, set[int]()
    for e, n in enumerate(counts):
        if not n or e in held:
            continue
        cpu = costs.cpu_latency + np.interp(n, *costs.cpu)
        if cpu <= copy + costs.device_latency + np.interp(n, *costs.device):
            chosen.add(e)
    return chosen


def parts(ids: Tensor, chosen: set[int], experts: int) -> tuple[Tensor, Tensor]:
    """ids with the chosen experts alone, and with the others alone; -1 in the place of those that are left out."""
    table = torch.zeros(experts, dtype=torch.bool, device=ids.device)
    table[sorted(chosen)] = True
    mine = table[ids]
    return torch.where(mine, ids, -1), torch.where(mine, -1, ids)
