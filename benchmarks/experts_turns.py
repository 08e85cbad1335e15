"""Builds of the native library in turns: what a change of a kernel gains, on a machine that has other work as well.

    python benchmarks/experts_turns.py before=/path/of/libgoldsmith.so after=src/goldsmith/lib/libgoldsmith.so
    python benchmarks/experts_turns.py --int8 before=... after=...       forward alone, in 8 bits
    python benchmarks/experts_turns.py --small fma=LIBRARY@avx512 pairs=LIBRARY@avx512_bf16       levels of one build

Each library lives in a process of its own (GOLDSMITH_LIBRARY is read once), and they take turns call by call, so that
a clock that falls and a neighbour that comes meet all of them alike. Time is that of the one thread that computes: what
other programs take of the processor is not in it, what they take of its caches is. Shown are medians, how much of the
probe that is (FLOPs of the base alone, LoRA's not), and the median of the ratios to the first library's call of the
same turn; name a library twice to see what of that is noise. The layer is DeepSeek-V2-Lite's with few experts, 32
tokens each (or `--tokens`), or with --small one of many experts: 64 of H 1024 and I 512, 8 of them for a token.
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
    """Of a format: milliseconds of gs_moe_forward and gs_moe_backward; int8: of products in 8 bits."""
    import torch

    from goldsmith import experts
    from goldsmith.experts._native_abi import NativeCall

    found: dict[str, float] = {}
    run = NativeCall.run

    def timed(call: NativeCall, which: str, *rest: object) -> None:
        began = time.thread_time_ns()
        run(call, which, *rest)  # type: ignore[arg-type]
        found[which] = (time.thread_time_ns() - began) / 1e6

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
        found.clear()
        if int8:
            with torch.no_grad():
                experts.moe(x, ids, weights, bases[format], compute="int8")
        else:
            y = experts.moe(x, ids, weights, bases[format], lora=lora)
            torch.autograd.grad(y, [x, weights, *lora.parameters()], dy)
        return dict(found)

    return call


def product(layer: str, tokens: int) -> float:
    """FLOPs a second of torch's own float32 product of as many rows as an expert has: [tokens, H] [H, I]."""
    import torch

    _, H, I, _ = LAYERS[layer].values()
    x, w, times = torch.randn(tokens, H), torch.randn(H, I), list[float]()
    for _ in range(WARM + 3):
        began = time.thread_time_ns()
        torch.mm(x, w)
        times.append((time.thread_time_ns() - began) / 1e9)
    return 2 * tokens * H * I / statistics.median(times[WARM:])


def work(given: argparse.Namespace) -> None:
    """One library: a line for each line of its input, which names a format, a probe, or `product`."""
    from goldsmith.core import native

    call = caller(given.layer, given.format, given.tokens, given.int8)
    for _ in range(WARM):
        for format in given.format:
            call(format)
    print(json.dumps(native.isa()), flush=True)
    for line in map(str.strip, sys.stdin):
        if line in FORMATS:
            answer: Any = call(line)
        elif line == "product":
            answer = product(given.layer, given.tokens)
        else:
            answer = native.measure(line, threads=1, seconds=0.01)
        print(json.dumps(answer), flush=True)


class Worker:
    def __init__(self, library: str, words: Sequence[str]) -> None:
        path, _, level = library.partition("@")
        environment = os.environ | {"GOLDSMITH_LIBRARY": os.path.abspath(path)}
        environment |= {"GOLDSMITH_ISA": level} if level else {}
        command = [sys.executable, __file__, "--one", *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.asked, self.answered = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self.level: str = self.answer()

    def ask(self, word: str) -> Any:
        self.asked.write(word + "\n")
        self.asked.flush()
        return self.answer()

    def answer(self) -> Any:
        line = self.answered.readline()
        if not line:
            raise SystemExit("a library's process ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="NAME=PATH[@LEVEL]")
    parser.add_argument("--format", nargs="+", choices=FORMATS)
    parser.add_argument("--int8", action="store_true", help='compute="int8": of the formats that have it')
    parser.add_argument("--small", dest="layer", action="store_const", const="small", default="v2-lite")
    parser.add_argument("--tokens", type=int, default=32, help="of an expert, on average")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.format = given.format or (IN_8_BITS if given.int8 else FORMATS)
    if given.one:
        return work(given)
    words = ["--tokens", str(given.tokens), *["--int8"] * given.int8, *["--small"] * (given.layer == "small")]
    words += ["--format", *given.format]
    workers = {name: Worker(path, words) for name, path in (library.split("=", 1) for library in given.libraries)}
    names, probe, peaks = list(workers), "vnni" if given.int8 else "fma", list[float]()
    products: list[float] = []
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(given.turns):
        for format in given.format:
            peaks.append(workers[names[0]].ask(probe))
            products.append(workers[names[0]].ask("product"))
            for name in names[:: -1 if turn % 2 else 1]:
                for which, found in workers[name].ask(format).items():
                    times.setdefault(f"{format} {which}", {}).setdefault(name, []).append(found)
    for worker in workers.values():
        worker.close()
    E, H, I, _ = LAYERS[given.layer].values()
    flops, peak = 6 * given.tokens * E * H * I, statistics.median(peaks)
    levels = ", ".join(f"{name} at {worker.level}" for name, worker in workers.items())
    print(f"{levels}; {probe} {peak / 1e9:.0f} G/s; load {os.getloadavg()[0]:.1f}")
    if not given.int8:
        mm = statistics.median(products)
        print(f"torch.mm of {given.tokens} float32 rows, H by I: {mm / 1e9:.0f} GFLOP/s ({mm / peak:.0%})")
    for case, by in times.items():
        print(f"{case:20} {'; '.join(said(name, t, by[names[0]], flops, peak) for name, t in by.items())}")


def said(name: str, times: list[float], first: list[float], flops: int, peak: float) -> str:
    median = statistics.median(times)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times, first, strict=True))
    return f"{name} {median:.2f} ms ({flops / peak / median * 1e3:.0%}, {ratio - 1:+.1%})"


if __name__ == "__main__":
    main()
