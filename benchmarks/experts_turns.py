"""Two builds of the native library in turns: what a change of a kernel gains, on a machine that has other work as well.

    python benchmarks/experts_turns.py before=/path/of/libgoldsmith.so after=src/goldsmith/lib/libgoldsmith.so
    GOLDSMITH_ISA=avx512_vnni python benchmarks/experts_turns.py --int8 before=... after=...    forward alone, in 8 bits

Each turn is a process of its own (GOLDSMITH_LIBRARY is read once) and takes the median of some calls, in time of the
one thread that computes: what other programs take of the processor is not in it, what they take of its caches is. Shown
is the median of all turns, and the least. The layer is DeepSeek-V2-Lite's with few experts, 32 tokens each (or
`--tokens`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

SIZES = {"E": 8, "H": 2048, "I": 1408, "k": 1, "rank": 8}
FORMATS = ("bf16", "int4", "int4_asym", "int8", "mxfp4", "fp8_block")
IN_8_BITS = ("int4", "int4_asym", "int8")
DRAWN, WARM = 2, 2


def turn(formats: Sequence[str], calls: int, tokens: int, int8: bool) -> dict[str, float]:
    """Milliseconds of gs_moe_forward and gs_moe_backward, by format and direction; int8: of products in 8 bits."""
    import torch

    from goldsmith import experts
    from goldsmith.experts._native_abi import Call

    found: dict[str, list[float]] = {}
    run = Call.run

    def timed(call: Call, which: str, *rest: object) -> None:
        began = time.thread_time_ns()
        run(call, which, *rest)  # type: ignore[arg-type]
        found.setdefault(f"{format} {which}", []).append((time.thread_time_ns() - began) / 1e6)

    Call.run = timed  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    E, H, I, k = (SIZES[name] for name in "EHIk")
    T = tokens * E
    gate_up = torch.randn(DRAWN, 2 * I, H).repeat(E // DRAWN, 1, 1) * H**-0.5
    down = torch.randn(DRAWN, H, I).repeat(E // DRAWN, 1, 1) * I**-0.5
    x, weights = torch.randn(T, H).bfloat16().requires_grad_(), torch.rand(T, k).requires_grad_()
    ids, dy = torch.rand(T, E).topk(k).indices, torch.randn(T, H).bfloat16()
    lora = experts.LoRA(E, H, I, rank=SIZES["rank"])
    for format in formats:
        base = experts.pack(gate_up, down, format=format)
        for _ in range(WARM + calls):
            if int8:
                with torch.no_grad():
                    experts.moe(x, ids, weights, base, compute="int8")
                continue
            y = experts.moe(x, ids, weights, base, lora=lora)
            torch.autograd.grad(y, [x, weights, *lora.parameters()], dy)
    return {name: statistics.median(times[WARM:]) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="NAME=PATH")
    parser.add_argument("--format", nargs="+", choices=FORMATS)
    parser.add_argument("--int8", action="store_true", help='compute="int8": of the formats that have it')
    parser.add_argument("--tokens", type=int, default=32, help="of an expert, on average")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    formats = given.format or (IN_8_BITS if given.int8 else FORMATS)
    if given.one:
        print(json.dumps(turn(formats, given.calls, given.tokens, given.int8)))
        return
    libraries = dict(library.split("=", 1) for library in given.libraries)
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.turns):
        for name, path in libraries.items():
            words = [sys.executable, __file__, "--one", "--calls", str(given.calls), "--tokens", str(given.tokens)]
            words += ["--int8"] * given.int8 + ["--format", *formats]
            environment = os.environ | {"GOLDSMITH_LIBRARY": os.path.abspath(path)}
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
            for case, found in json.loads(done.stdout).items():
                times.setdefault(case, {}).setdefault(name, []).append(found)
    print(f"load {os.getloadavg()[0]:.1f}")
    for case, by in times.items():
        said = [f"{name} {statistics.median(t):.2f} ms, at least {min(t):.2f}" for name, t in by.items()]
        print(f"{case:20} {'; '.join(said)}")


if __name__ == "__main__":
    main()
