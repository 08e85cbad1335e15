"""BenchCase: a case at a real size for `goldsmith bench`, with the bytes that any implementation must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BenchCase:
    """One row of `goldsmith bench`. Bytes and FLOPs are a lower bound; `why` says what they count.

    build(dtype=, device=, seed=) draws the operator's inputs and options by name. backward_bytes is None if only the
    forward is timed. Optional inputs are left out unless `optional` names them, because peers have none.
    rotated: inputs drawn with one more leading dimension; each call uses the next slice.
    products: the instructions whose peak limits the FLOPs (core.native.PROBES), if they are not those of the dtype.
    on_cpu: whether a CPU times this case by default; None: decided by the product of its sizes.
    replayed: on a GPU, also time the forward as calls of one CUDA graph, with inputs that are not in L2.
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
