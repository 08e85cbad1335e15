"""The least time of a call at the rates that the hardware reaches, independent of our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from goldsmith.cli.bench.ceilings import megabytes_beyond_caches
from goldsmith.cli.bench.timing import clock
from goldsmith.core import native
from goldsmith.offload.engine import Engine
from goldsmith.offload.planning.costs import Costs
from goldsmith.offload.planning.plan import plan, predict_stream

PRODUCTS = ("amx_bf16", "dot_bf16", "fma")
SIDE = 4096  # of the square matrices multiplied on a GPU


def rates(engine: Engine, link: float) -> Costs:
    """The engine's costs with measured rates of reading, copying and multiplying, without latencies.

    link   measured bytes per second over the link
    """
    known = engine.calibration.costs
    read, products, device_read, device_products = _measured(engine.device, engine.threads)
    return Costs(
        expert_bytes=known.expert_bytes, flops_per_token=known.flops_per_token, cpu_bytes_per_s=read,
        cpu_flops=products, link_bytes_per_s=link, dram_bytes_per_s=max(read, link), device_bytes_per_s=device_read,
        device_flops=device_products, cpu_latency=0.0, link_latency=0.0, device_latency=0.0,
    )  # fmt: skip


@lru_cache
def _measured(device: torch.device, threads: int) -> tuple[float, float, float, float]:
    """Bytes and operations per second of the CPU and of the device, measured once per run."""
    read = max(native.measure("read", threads=threads, seconds=0.1, megabytes=megabytes_beyond_caches()) for _ in "ab")
    products = max(_products(what, threads) for what in PRODUCTS)
    if device.type != "cuda":
        return read, products, read, products
    return read, products, 1e6 * clock(str(device)).copy_rate(), _gpu_products(device)


def predicted_time(counts: Sequence[int], cached: Sequence[int], costs: Costs) -> float:
    """Seconds of the best split, or of streaming the layer where that takes less."""
    return min(plan(counts, cached, costs).predicted, predict_stream(counts, cached, costs))


def _products(what: str, threads: int) -> float:
    try:
        return native.measure(what, threads=threads, seconds=0.1)
    except native.BackendUnavailable:
        return 0.0


def _gpu_products(device: torch.device) -> float:
    a = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        a @ a
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ a
    end.record()
    torch.cuda.synchronize(device)
    return 20 * 2 * SIDE**3 / (start.elapsed_time(end) * 1e-3)
