"""The least time of a layer's AMX tile products at several distances from memory, and the operator's time.

    python -m benchmarks.experts.tiles                        2,048 tokens, bf16
    python -m benchmarks.experts.tiles --tokens 256 --format int4 --threads 1 16

It runs with 1, 2, 4, ... and all threads, and prints nanoseconds of a core per step. A step is four tile products: 32
rows by 32 inputs by 32 outputs, 65,536 operations. Columns:

    registers, L1, L2, stream   probes (`native.measure`) with operands in registers, in L1, with all rows of an expert
                                and one stripe of weights in L2, and with the layer's weights from memory
    weights                     the base's bytes at the rate of `read` with as many threads, per step
    forward, backward           wall time of a call with LoRA of rank 8 over the steps of the base's products alone, so
                                it includes activation, LoRA, gathers and sums

Probes and operator take turns; the figures are medians. The layer is that of DeepSeek-V2-Lite. Level amx only.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from goldsmith import experts
from goldsmith.core import native, processors

E, H, I, K, RANK, DRAWN = 64, 2048, 1408, 6, 8, 2
STEP = 2 * 32 * 32 * 32
FORMATS = ("bf16", "int4", "int4_asym", "int8", "mxfp4", "fp8_block")


def layer(tokens: int, format: str) -> tuple[Callable[[], tuple[float, float]], int]:
    """(a call that returns the seconds of forward and backward, the base's bytes)."""
    torch.manual_seed(0)
    gate_up = torch.randn(DRAWN, 2 * I, H).repeat(E // DRAWN, 1, 1) * H**-0.5
    down = torch.randn(DRAWN, H, I).repeat(E // DRAWN, 1, 1) * I**-0.5
    base = experts.pack(gate_up, down, format=format)
    del gate_up, down
    lora = experts.LoRA(E, H, I, rank=RANK)
    x, weights = torch.randn(tokens, H).bfloat16().requires_grad_(), torch.rand(tokens, K).requires_grad_()
    ids, dy = torch.rand(tokens, E).topk(K).indices, torch.randn(tokens, H).bfloat16()

    def call() -> tuple[float, float]:
        began = time.perf_counter()
        y = experts.moe(x, ids, weights, base, lora=lora)
        between = time.perf_counter()
        torch.autograd.grad(y, [x, weights, *lora.parameters()], dy)
        return between - began, time.perf_counter() - between

    call()
    return call, base.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = processors.worth()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8) if n < most] + [most])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if native.isa() != "amx":
        raise SystemExit(f"the level is {native.isa()}, but only amx has tiles: {native.machine_isa()[1]}")
    routes = options.tokens * K
    rows = max(32, -(-routes // E // 32) * 32)  # average rows of an expert, in whole tiles
    steps = 6 * H * I * routes / STEP
    call, nbytes = layer(options.tokens, options.format)
    print(f"{options.tokens} tokens, {options.format}, {rows} rows an expert; load {os.getloadavg()[0]:.1f}; ns a step")
    print("threads  registers    L1    L2  stream  weights  forward  backward   forward  backward, ms   read, GB/s")
    for threads in options.threads:
        torch.set_num_threads(threads)
        samples: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for probe in ("amx_bf16", "amx_l1", "amx_l2", "amx_stream"):
                rate = native.measure(probe, threads=threads, seconds=0.1, megabytes=1024, rows=rows)
                samples.setdefault(probe, []).append(threads * STEP / rate * 1e9)
            samples.setdefault("read", []).append(native.measure("read", threads=threads, seconds=0.1, megabytes=1024))
            for which, seconds in zip(("forward", "backward"), call(), strict=True):
                samples.setdefault(which, []).append(seconds)
        now = {name: statistics.median(values) for name, values in samples.items()}
        each = [threads * now[which] / steps * 1e9 for which in ("forward", "backward")]
        print(
            f"{threads:7} {now['amx_bf16']:10.1f} {now['amx_l1']:5.1f} {now['amx_l2']:5.1f} {now['amx_stream']:7.1f} "
            f"{threads * nbytes / now['read'] / steps * 1e9:8.1f} {each[0]:8.1f} {each[1]:9.1f} "
            f"{now['forward'] * 1e3:9.1f} {now['backward'] * 1e3:13.1f} {now['read'] / 1e9:12.1f}"
        )


if __name__ == "__main__":
    main()
