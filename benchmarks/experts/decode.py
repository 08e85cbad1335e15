"""The experts of one layer for one token: every format, native and with Python, beside the memory's read bandwidth.

    python -m benchmarks.experts.decode                     writes benchmarks/results/experts_decode.json, in 2 minutes
    python -m benchmarks.experts.decode --ggml DIR          with ggml's kernels, from the shared libraries in DIR
    python -m benchmarks.experts.decode --levels avx2 --formats int4 --out -

A layer has 32 experts of H 1024 and I 512, 8 for a token. The experts of a token rotate over 260 MB of weights, so that
they come from memory. "native" is gs_moe_forward with its arguments ready; "with Python" is `experts.moe`. Bandwidth
is read before each row, by as many threads, because a virtual machine's neighbours change it. Times are medians of
single calls, with the tenth and ninetieth percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int, c_int64, c_size_t
from pathlib import Path
from typing import Any

import torch

from goldsmith import experts
from goldsmith.assay.declare.case import Make
from goldsmith.cli.bench.rows import Conditions
from goldsmith.core import native
from goldsmith.experts import benchmarks
from goldsmith.experts._conventions import NAMES
from goldsmith.experts._native_abi import NativeCall
from goldsmith.experts.packed.experts import PackedExperts
from goldsmith.experts.packed.layout import Layout

from ..peers.ggml import TYPES, Ggml, Layers

LAYER = {"H": 1024, "I": 512, "E": 32, "k": 8}
FORMATS = ("fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block")
WHOLE = ("int8", "int4", "int4_asym")
LEVELS = ("avx2", "avx512_bf16", "amx")
WEIGHTS = 260e6  # bytes of all experts, several times the last cache
OPTIONS = ("layout", "gate_scale", "up_scale", "down_scale", "dropout", "activation", "alpha", "limit")
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "experts_decode.json"


def arguments(format: str) -> tuple[dict[str, Any], int]:
    """Arguments of experts.moe for several tokens that share no expert, and the bytes that one of them reads."""
    H, I, k = (LAYER[axis] for axis in "HIk")
    each = benchmarks._expert_bytes(H, I, format)
    E = max(LAYER["E"], k * -(-int(WEIGHTS) // (k * each)))
    make = Make(torch.float32, "cpu", 0)
    return benchmarks.inputs(make, T=1, H=H, I=I, E=E, k=k, r=0, packed=format, rotated=True), k * each


def native_calls(drawn: dict[str, Any], compute: str) -> Iterator[Callable[[], object]]:
    layout, function = Layout.parse(drawn["layout"]), native.library().gs_moe_forward
    for ids in drawn["topk_ids"]:
        options = {name: drawn[name] for name in OPTIONS}
        if compute == "int8":
            options["int8"] = layout.group_size or max(layout.hidden_size, layout.intermediate_size)
        call = NativeCall({name: drawn[name] for name in NAMES} | {"topk_ids": ids}, options)
        call.keep("y", torch.empty_like(drawn["x"]))
        yield lambda call=call: native.check(function(byref(call.args)))  # type: ignore[misc]


def python_calls(drawn: dict[str, Any], compute: str) -> Iterator[Callable[[], object]]:
    base = PackedExperts._of(Layout.parse(drawn["layout"]), drawn["gate_up"], drawn["down"])
    for ids in drawn["topk_ids"]:
        yield lambda ids=ids: experts.moe(  # type: ignore[misc]
            drawn["x"], ids, drawn["topk_weights"], base, compute=compute, backend="native"
        )


def timed(calls: Sequence[Callable[[], object]], seconds: float) -> dict[str, float]:
    for call in calls:
        call()
    times, number, end = list[float](), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        calls[number % len(calls)]()
        times.append((time.perf_counter() - began) * 1e6)
        number += 1
    return summary(times)


def summary(times: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    return {"us": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


def ours(format: str, levels: Sequence[str], threads: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    drawn, size = arguments(format)
    library = native.library()
    before = library.gs_level()
    try:
        for level in levels:
            native.check(library.gs_set_level(native.LEVELS.index(level)))
            for compute in ("float", "int8") if format in WHOLE else ("float",):
                for team in threads:
                    torch.set_num_threads(team)
                    read = native.measure("read", threads=team, seconds=seconds / 2)
                    yield {
                        "who": "goldsmith",
                        "format": format,
                        "level": level,
                        "compute": compute,
                        "threads": team,
                        "bytes": size,
                        "read": read,
                        "native": timed(list(native_calls(drawn, compute)), seconds),
                        "python": timed(list(python_calls(drawn, compute)), seconds),
                    }
    finally:
        native.check(library.gs_set_level(before))


def theirs(ggml: Ggml, format: str, threads: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    name, kind = TYPES[format]
    H, I, E, k = (LAYER[axis] for axis in "HIEk")
    rows = (H, 2 * I), (I, H)
    size = sum(n * int(ggml.call("ggml_row_size", c_int(kind), c_int64(width), result=c_size_t)) for width, n in rows)  # type: ignore[call-overload]
    layers = Layers(ggml, format, LAYER, max(2, -(-int(WEIGHTS) // (size * E))))
    for team in threads:
        layers.threads(team)
        read = native.measure("read", threads=team, seconds=seconds / 2)
        layers.us()
        times, end = [layers.us()], time.perf_counter() + 2 * seconds
        while time.perf_counter() < end or len(times) < 5:
            times.append(layers.us())
        yield {
            "who": f"ggml, {name}" + (", repacked" if layers.buffer != "CPU" else ""),
            "format": format,
            "level": "its own",
            "compute": "rows in 8 bits" if format in ("int8", "int4", "mxfp4") else "float",
            "threads": team,
            "bytes": k * size,
            "read": read,
            "native": summary(times),
        }
    layers.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--levels", nargs="+", choices=native.LEVELS)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--ggml", type=Path, metavar="DIR", help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--out", default=str(RESULT), help="a file, or - to print only")
    options = parser.parse_args()
    here, highest = Conditions.here("cpu"), native.library().gs_machine_level()
    levels = options.levels or [level for level in LEVELS if native.LEVELS.index(level) <= highest]
    ggml = Ggml(options.ggml) if options.ggml else None
    rows = []
    with torch.no_grad():
        for format in options.formats:
            for row in ours(format, levels, options.threads, options.seconds):
                rows.append(row)
                print(line(row), flush=True)
            if ggml is not None and format in TYPES:
                for row in theirs(ggml, format, options.threads, options.seconds):
                    rows.append(row)
                    print(line(row), flush=True)
    if options.out == "-":
        return
    content = {
        "machine": here.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in here.versions.items()),
        "commit": here.commit,
        "case": ", ".join(f"{name}={size}" for name, size in LAYER.items()) + ", T=1, x in float32",
        "command": "python -m benchmarks.experts.decode" + (" --ggml DIR" if ggml else ""),
        "rows": rows,
    }
    Path(options.out).write_text(json.dumps(content, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    rate = row["bytes"] / row["native"]["us"] / 1e3
    text = f"{row['who']:24} {row['format']:9} {row['level']:11} {row['compute']:14} {row['threads']} threads: "
    text += f"{row['native']['us']:5.0f} us, {rate:4.1f} of {row['read'] / 1e9:4.1f} GB/s"
    return text + (f"; with Python {row['python']['us']:5.0f} us" if "python" in row else "")


if __name__ == "__main__":
    main()
