"""What `goldsmith bench` times: a case at a real size, and the bytes that any implementation must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class BenchCase:
    """One row of `goldsmith bench`. The bytes are a floor: what is counted is said in `why`.

    build(dtype=, device=, seed=) draws the operator's inputs and options by name; backward_bytes is None where only the
    forward is timed. Of the optional inputs those in `optional` are timed, the others left out, as peers have them.
    """

    name: str
    sizes: Mapping[str, Any]
    dtype: torch.dtype
    build: Callable[..., dict[str, Any]]
    forward_bytes: int
    backward_bytes: int | None = None
    why: str = ""
    optional: tuple[str, ...] = ()
