"""Writes the generated tables into the documents, between their markers.

    python scripts/tables.py            brings every document up to date
    python scripts/tables.py --check    changes nothing; exit status 1 and the documents' names when one is not

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`, NAME being one of the functions in TABLES.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # so that a machine without a GPU can say what the kernels take

import torch

from goldsmith import Op
from goldsmith.assay.case import Case

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.S)
DTYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill(text: str) -> str:
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def support() -> str:
    """Which backend takes what, asked of the backends themselves, with every operator's own cases."""
    rows, refusals = [], {}
    for op in Op.all().values():
        if op.internal:
            continue
        row = [f"`{op.name}`", op.summary, "of all inputs" if op.grads == op.inputs else ", ".join(op.grads) or "none"]
        for backend in ("reference", "triton"):
            taken, streams = [], set()
            for dtype in DTYPES if backend in op.backends else ():
                for case, reason in refused(op, backend, dtype):
                    if reason is None:
                        taken.append(dtype)
                        streams.add(case.sizes.get("n"))
                    elif "float64" not in reason:
                        refusals.setdefault(reason, []).append(f"`{op.name}`")
            row.append(" ".join(DTYPES[d] for d in dict.fromkeys(taken)) or "-")
        row.append(", ".join(str(n) for n in sorted(streams - {None})) if "triton" in op.backends else "-")
        rows.append(row)
    titles = ["operator", "computes", "gradients", "reference: any device, any n", "Triton: CUDA", "Triton: n tried"]
    notes = [f"- Triton, {', '.join(dict.fromkeys(names))}: {reason}.\n" for reason, names in refusals.items()]
    return table(titles, rows) + "\n" + "".join(notes)


def refused(op: Op, backend: str, dtype: str) -> Iterator[tuple[Case, str | None]]:
    """Each small case with why the backend would not take it, or None."""
    for case in op.cases:
        if "large" not in case.tags:
            given = case.build(getattr(torch, dtype))
            tensors, options = [given.get(name) for name in op.inputs], {name: given[name] for name in op.options}
            yield case, op.why_not(backend, *tensors, **options)


TABLES: dict[str, Callable[[], str]] = {"support": support}


def main(arguments: list[str]) -> int:
    stale = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]:
        old = path.read_text()
        new = fill(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(new)
    if stale:
        print(f"{'not up to date' if '--check' in arguments else 'brought up to date'}: {', '.join(stale)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
