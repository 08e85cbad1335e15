"""What compute="int8" costs in exactness: the error of a layer, and the perplexity of a small model.

    python -m benchmarks.experts.int8            prints both tables
    python -m benchmarks.experts.int8 --write    and records them for docs/offload.md (then: python scripts/tables.py)
    python -m benchmarks.experts.int8 --sizes 64,32 --tokens 200      a quick run

The layer: `experts.moe` in float and in 8 bits at every level of instructions, judged by the assay against float64 with
the same packed weights. The assay also runs the golden in float32 in many orders of summation. Their deviation is the
noise, and the error is stated as a multiple of it. The model: examples/shakespeare-moe on an act of Macbeth that it was
not trained on, with the experts in each format and in each arithmetic.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldsmith import experts, offload
from goldsmith.assay import Target, check
from goldsmith.assay.declare.case import Case, Make
from goldsmith.cli.bench.rows import Conditions, rounded
from goldsmith.core import native
from goldsmith.core.op import Op
from goldsmith.experts import benchmarks
from goldsmith.experts.packed.experts import PackedExperts
from goldsmith.experts.packed.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
MODEL, TEXT = ROOT / "examples" / "shakespeare-moe", ROOT / "examples" / "macbeth" / "act-5.txt"
RESULT = ROOT / "benchmarks" / "results" / "experts_int8.json"
MOE = Op.get("experts.moe")
FORMATS, COMPUTES = ("int8", "int4", "int4_asym"), ("float", "int8")
E, K, T = 8, 4, 8
OF_MODEL = ("int8", "int4")  # int4_asym has groups of 128, which do not divide the model's I of 96
WINDOW = 256  # tokens of a forward, those of the model's training
Figures = dict[str, Any]


def layers_error(format: str, sizes: tuple[int, int], levels: Sequence[str]) -> Iterator[Figures]:
    """The assay's figures of y at each level, float and int8."""
    H, I = sizes
    library = native.library()
    before = library.gs_level()
    try:
        for compute in COMPUTES:
            for level in levels:
                native.check(library.gs_set_level(native.LEVELS.index(level)))
                target = layer_target(format, compute, H, I)
                report = check(target, probes=("values", "ensemble"), raises=False)
                row = next(row for row in report.rows if row.tensor == "y")
                yield {
                    "format": format,
                    "compute": compute,
                    "level": level,
                    "max_error": row.max_error,
                    "rms_over_noise": row.rms_over_noise,
                    "relative": relative(target),
                    "state": row.state,
                }
    finally:
        native.check(library.gs_set_level(before))


def layer_target(format: str, compute: str, H: int, I: int) -> Target:
    """`experts.moe` in this arithmetic, whose golden is the reference over the same packed weights."""

    def draw(make: Make) -> dict[str, object]:
        drawn = benchmarks.inputs(make, T=T, H=H, I=I, E=E, k=K, r=0, packed=format)
        others.update(drawn)
        return {name: drawn[name] for name in ("x", "topk_ids", "topk_weights", "gate_up", "down", "layout")}

    def candidate(
        x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, layout: str
    ) -> Tensor:
        base = PackedExperts._of(Layout.parse(layout), gate_up, down)
        return experts.moe(x, topk_ids, topk_weights, base, compute=compute, backend="native")

    def golden(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, layout: str) -> Tensor:
        given = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "gate_up": gate_up, "down": down}
        arguments = others | given | {"layout": layout}
        tensors = [arguments[name] for name in MOE.inputs]
        return MOE.reference.forward(*tensors, **{name: arguments[name] for name in MOE.options})[0]

    others: Figures = {}  # arguments that are the same in every run
    return Target(
        candidate, golden, cases=[Case(format, draw)], name=f"{format} in {compute}", outputs=("y",), backward=None,
        dtypes=(torch.float32,),
    )  # fmt: skip


def relative(target: Target) -> float:
    """|y - golden| / |golden| in the Euclidean norm."""
    inputs = target.cases[0].build(torch.float32)
    y = target.candidate(**inputs).double()
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    golden = target.golden(**wide)
    return float((y - golden).norm() / golden.norm())


def perplexities(formats: Sequence[str], tokens: int | None) -> Iterator[Figures]:
    """exp of the mean negative log likelihood of each next token, in windows that do not overlap."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(), return_tensors="pt")["input_ids"][0][:tokens]
    for format, compute in (
        ("auto", "exact"),
        *((format, c) for format in formats if format in OF_MODEL for c in ("exact", "int8")),
    ):
        with offload.from_pretrained(
            MODEL, dtype=torch.float32, device="cpu", cpu_format=format, exact=format == "auto", compute=compute
        ) as offloaded:
            total, count = 0.0, 0
            for window in ids.split(WINDOW):
                if len(window) > 1:
                    with torch.inference_mode():
                        logits = offloaded.model(window[None]).logits[0, :-1].double()
                    total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
                    count += len(window) - 1
        yield {
            "format": "as trained" if format == "auto" else format, "compute": compute, "tokens": count,
            "perplexity": math.exp(total / count),
        }  # fmt: skip


def line(row: Figures) -> str:
    name = f"{row['format']:10} {row['compute']:6} "
    if "perplexity" in row:
        return f"{name} perplexity {row['perplexity']:.5f} of {row['tokens']} tokens"
    noise = row["rms_over_noise"]
    times = "-" if noise is None else f"{noise:.3g}"
    return f"{name} {row['level']:12} error {row['relative']:.2e}, largest {row['max_error']:.2e}, {times} x noise"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="256,128", metavar="H,I", help="of the layer (256,128)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--levels", nargs="+", choices=native.LEVELS, help="the machine's from avx2 on")
    parser.add_argument("--tokens", type=int, help="of the text; all of it by default")
    parser.add_argument("--write", action="store_true", help=f"record the rows in {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(words)
    H, I = (int(size) for size in options.sizes.split(","))
    here, highest = Conditions.here("cpu"), native.library().gs_machine_level()
    levels = options.levels or native.LEVELS[native.LEVELS.index("avx2") : highest + 1]
    content: Figures = {
        "machine": here.machine,
        "versions": here.versions,
        "commit": here.commit,
        "date": here.date,
        "layer": f"H={H}, I={I}, E={E}, k={K}, T={T}, x in float32",
        "rows": [],
    }
    for format in options.formats:
        for row in layers_error(format, (H, I), levels):
            content["rows"].append(row)
            print(line(row), flush=True)
    content["rows"] += list(perplexities(options.formats, options.tokens))
    print("\n".join(line(row) for row in content["rows"] if "perplexity" in row))
    if options.write:
        content["rows"] = [{name: rounded(value) for name, value in row.items()} for row in content["rows"]]
        RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
