"""Times several builds of the native library in turns, to see what a kernel change gains even on a busy machine.

    python -m benchmarks.experts.turns before=/path/of/libgoldsmith.so after=src/goldsmith/lib/libgoldsmith.so
    python -m benchmarks.experts.turns --int8 before=... after=...       forward only, in 8 bits
    python -m benchmarks.experts.turns --small fma=LIBRARY@avx512 pairs=LIBRARY@avx512_bf16       levels of one build

Each library runs in its own process (GOLDSMITH_LIBRARY is read once). They take turns call by call, so that a falling
clock or a busy neighbour affects all alike. The time is CPU time of the one computing thread: it excludes the processor
time of other programs, but not their use of the caches. The output has medians, their share of the probe's rate (FLOPs
of the base, without LoRA), and the median ratio to the first library's call of the same turn. Name a library twice to
see the noise. The layer is that of DeepSeek-V2-Lite with few experts and 32 tokens each (or `--tokens`). With --small
it has 64 experts of H 1024 and I 512, 8 per token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, cast

LAYERS = {"v2-lite": {"E": 8, "H": 2048, "I": 1408, "k": 1}, "small": {"E": 64, "H": 1024, "I": 512, "k": 8}}
RANK = 8
FORMATS = ("bf16", "int4", "int4_asym", "int8", "mxfp4", "fp8_block")
IN_8_BITS = ("int4", "int4_asym", "int8")
DRAWN, WARM = 2, 2


def caller(layer: str, formats: Sequence[str], tokens: int, int8: bool) -> Callable[[str], dict[str, float]]:
    """A function: format -> milliseconds of gs_moe_forward and gs_moe_backward; int8: with products in 8 bits."""
    import torch

    from goldsmith import experts
    from goldsmith.experts._native_abi import NativeCall

    times: dict[str, float] = {}
    run = NativeCall.run

    def timed(call: NativeCall, which: str, *rest: object) -> None:
        began = time.thread_time_ns()
        run(call, which, *rest)  # type: ignore[arg-type]
        times[which] = (time.thread_time_ns() - began) / 1e6

    NativeCall.run = timed  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    E, H, I, k = LAYERS[layer].values()
    T = tokens * E // k
    gate_up = torch.randn(DRAWN, 2 * I, H).repeat(E // DRAWN, 1, 1) * H**-0.5
    down = torch.randn(DRAWN, H, I).repeat(E // DRAWN, 1, 1) * I**-0.5
    x, weights = torch.randn(T, H).bfloat16().requires_grad_(), torch.rand(T, k).requires_grad_()
    ids, dy = torch.rand(T, E).topk(k).indices, torch.randn(T, H).bfloat16()
    lora = experts.LoRA(E, H, I, rank=RANK)
    bases = {format: experts.pack(gate_up, down, format=format) for format in formats}

    def call(format: str) -> dict[str, float]:
        times.clear()
        if int8:
            with torch.no_grad():
                experts.moe(x, ids, weights, bases[format], compute="int8")
        else:
            y = experts.moe(x, ids, weights, bases[format], lora=lora)
            torch.autograd.grad(y, [x, weights, *lora.parameters()], dy)
        return dict(times)

    return call


def product(layer: str, tokens: int) -> float:
    """FLOPs per second of torch's float32 product [tokens, H] [H, I], with the rows of one expert."""
    import torch

    _, H, I, _ = LAYERS[layer].values()
    x, w, times = torch.randn(tokens, H), torch.randn(H, I), list[float]()
    for _ in range(WARM + 3):
        began = time.thread_time_ns()
        torch.mm(x, w)
        times.append((time.thread_time_ns() - began) / 1e9)
    return 2 * tokens * H * I / statistics.median(times[WARM:])


def work(options: argparse.Namespace) -> None:
    """Serve one library: answer each line of stdin (a format, a probe, or `product`) with a line of JSON."""
    from goldsmith.core import native

    call = caller(options.layer, options.format, options.tokens, options.int8)
    for _ in range(WARM):
        for format in options.format:
            call(format)
    print(json.dumps(native.isa()), flush=True)
    for line in map(str.strip, sys.stdin):
        if line in FORMATS:
            answer: Any = call(line)
        elif line == "product":
            answer = product(options.layer, options.tokens)
        else:
            answer = native.measure(line, threads=1, seconds=0.01)
        print(json.dumps(answer), flush=True)


class Worker:
    """The process of one library."""

    def __init__(self, library: str, words: Sequence[str]) -> None:
        path, _, level = library.partition("@")
        environment = os.environ | {"GOLDSMITH_LIBRARY": os.path.abspath(path)}
        environment |= {"GOLDSMITH_ISA": level} if level else {}
        command = [sys.executable, __file__, "--one", *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.orders, self.answers = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self.level: str = self.answer()

    def ask(self, word: str) -> Any:
        self.orders.write(word + "\n")
        self.orders.flush()
        return self.answer()

    def answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise SystemExit("a library's process ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="NAME=PATH[@LEVEL]")
    parser.add_argument("--format", nargs="+", choices=FORMATS)
    parser.add_argument("--int8", action="store_true", help='compute="int8", for the formats that have it')
    parser.add_argument("--small", dest="layer", action="store_const", const="small", default="v2-lite")
    parser.add_argument("--tokens", type=int, default=32, help="average tokens per expert")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.format = options.format or (IN_8_BITS if options.int8 else FORMATS)
    if options.one:
        return work(options)
    words = ["--tokens", str(options.tokens), *["--int8"] * options.int8, *["--small"] * (options.layer == "small")]
    words += ["--format", *options.format]
    workers = {name: Worker(path, words) for name, path in (library.split("=", 1) for library in options.libraries)}
    names, probe, peaks = list(workers), "vnni" if options.int8 else "fma", list[float]()
    products: list[float] = []
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.turns):
        for format in options.format:
            peaks.append(workers[names[0]].ask(probe))
            products.append(workers[names[0]].ask("product"))
            for name in names[:: -1 if turn % 2 else 1]:
                for which, entry in workers[name].ask(format).items():
                    times.setdefault(f"{format} {which}", {}).setdefault(name, []).append(entry)
    for worker in workers.values():
        worker.close()
    E, H, I, _ = LAYERS[options.layer].values()
    flops, peak = 6 * options.tokens * E * H * I, statistics.median(peaks)
    levels = ", ".join(f"{name} at {worker.level}" for name, worker in workers.items())
    print(f"{levels}; {probe} {peak / 1e9:.0f} G/s; load {os.getloadavg()[0]:.1f}")
    if not options.int8:
        mm = statistics.median(products)
        print(f"torch.mm of {options.tokens} float32 rows, H by I: {mm / 1e9:.0f} GFLOP/s ({mm / peak:.0%})")
    for case, by in times.items():
        print(f"{case:20} {'; '.join(summary(name, t, by[names[0]], flops, peak) for name, t in by.items())}")


def summary(name: str, times: list[float], first: list[float], flops: int, peak: float) -> str:
    median = statistics.median(times)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times, first, strict=True))
    return f"{name} {median:.2f} ms ({flops / peak / median * 1e3:.0%}, {ratio - 1:+.1%})"


if __name__ == "__main__":
    main()
