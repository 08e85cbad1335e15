"""The least time that a call can take on this device: its inputs must be read, and the golden's products computed.

The device's rates are measured by the judge once in its life, and a margin is added, because a floor must not be above
what the device can do.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

MARGIN = 1.5  # on a measured rate
_MEGABYTES = 256
_SIDE = {"cpu": 512, "cuda": 4096}  # of the measured product


def least_us(inputs: Mapping[str, Tensor], golden: Callable[[], object], device: torch.device) -> tuple[float, str]:
    """(microseconds, what sets them)"""
    read = sum(t.numel() * t.element_size() for t in inputs.values())
    by_memory = read / (MARGIN * read_rate(str(device)))
    flop = products(golden)
    dtypes = {t.dtype for t in inputs.values() if t.is_floating_point() and t.dtype.itemsize > 1}
    narrowest = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    by_products = flop / (MARGIN * product_rate(str(device), narrowest)) if flop else 0.0
    if by_products > by_memory:
        return by_products, f"{flop:.3g} FLOP in {str(narrowest).removeprefix('torch.')}"
    return by_memory, f"{read:,} bytes to read"


@functools.cache
def read_rate(device: str) -> float:
    """Bytes per microsecond of a sum over a buffer that no cache holds."""
    source = torch.ones(_MEGABYTES << 18, device=device)  # float32
    return max(source.numel() * 4 / _us(source.sum, device) for _ in range(5))


@functools.cache
def product_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP per microsecond of a square matrix product; float32 with tensor cores, if there are any."""
    side = _SIDE[torch.device(device).type]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        a = torch.ones(side, side, device=device, dtype=dtype)
        return max(2 * side**3 / _us(lambda: a @ a, device) for _ in range(5))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def products(golden: Callable[[], object]) -> float:
    """FLOPs of the matrix products, convolutions and attention of one call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        golden()
    return float(counter.get_total_flops())


def _us(call: Callable[[], object], device: str) -> float:
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize(device)
    return max((time.perf_counter() - began) * 1e6, 1e-3)
