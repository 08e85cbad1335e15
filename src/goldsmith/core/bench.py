"""What `goldsmith bench` times: a case at a real size, and the bytes that any implementation must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BenchCase:
    """One row of `goldsmith bench`. The bytes and FLOPs are a floor: what is counted is said in `why`.

    build(dtype=, device=, seed=) draws the operator's inputs and options by name; backward_bytes is None where only the
    forward is timed. Of the optional inputs those in `optional` are timed, the others left out, as peers have them.
    The inputs in `rotated` are drawn with a dimension more in front: each call takes the next of them.
    products: the instructions that its FLOPs are held to (core.native.PROBES), where they are not those of the dtype.
    on_cpu: whether a CPU takes the case unless others are named; None: by the product of its sizes.
    replayed: on a GPU the forward is also timed as calls in one CUDA graph, none of which finds its inputs in L2.
    """

    name: str
    sizes: Mapping[str, Any]
    dtype: torch.dtype
    build: Callable[..., dict[str, Any]]
    forward_bytes: int
    backward_bytes: int | None = None
    why: str = ""
    optional: tuple[str, ...] = ()
    forward_flop: int | None = None
    backward_flop: int | None = None
    rotated: tuple[str, ...] = ()
    on_cpu: bool | None = None
    products: tuple[str, ...] = ()
    replayed: bool = False
