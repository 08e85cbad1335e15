"""Rates of the traced line: for how many faults in Python or Triton sources it is the faulty one.

    python -m benchmarks.kernelfault.lines --out rows.jsonl [--sample N] [--author A] [--jobs N] [NAME ...]

The true lines are those that differ between the right and the wrong source; a statement over several lines counts as
all of them, and for a missing statement the lines next to it count. A run continues where the file ends.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the child process runs this file, whose folder must not be imported from
    sys.path[:1] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.kernelfault import catalogue
from benchmarks.kernelfault.catalogue import HERE, ROOT, Fault

SOURCES = ("torch", "triton")
LIMIT = 180.0  # seconds of one fault, with its check
Row = dict[str, Any]


def chosen(names: Sequence[str], sample: int | None, author: str | None, seed: int = 27) -> list[Fault]:
    """Faults whose source is the user's; a sample is the same each time."""
    known = [
        f for f in catalogue.faults()
        if f.counted and f.backend in SOURCES and not f.host.package and author in (None, f.host.author)
        and (not names or f.host.name in names or f.key in names)
    ]  # fmt: skip
    if sample is None or sample >= len(known):
        return known
    picked = set(random.Random(seed).sample(range(len(known)), sample))
    return [f for n, f in enumerate(known) if n in picked]


def true_lines(right: str, wrong: str) -> set[int]:
    """Lines of the wrong source that an edit touched, with all lines of their statements."""
    a, b = right.splitlines(), wrong.splitlines()
    lines: set[int] = set()
    for kind, _, _, start, end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind != "equal":
            lines |= set(range(start + 1, end + 1)) or {start, start + 1}
    for node in ast.walk(ast.parse(wrong)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.end_lineno is not None:
            own = range(node.lineno, node.end_lineno + 1)
            if lines & set(own):
                lines |= set(own)
    return lines


def examined(key: str) -> Row:
    """The row of one fault, in this process."""
    fault = next(f for f in catalogue.faults() if f.key == key)
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        path = catalogue.copy(fault.host, fault.backend, fault, Path(folder))
        from benchmarks.kernelfault import targets
        from goldsmith.assay.diagnosis.trace.line_search import NoLine, traced_line

        target, _, failing = targets.failing(fault, path)
        right = (ROOT / fault.file).read_text(encoding="utf-8")
        truth = true_lines(right, catalogue.applied(right, fault))
        row: Row = {"fault": key, "backend": fault.backend, "author": fault.host.author, "what": fault.what,
                    "truth": sorted(truth)}  # fmt: skip
        began = time.perf_counter()
        try:
            line = traced_line(target, failing[0], 30.0)
            row |= {
                "line": line.at.line, "expression": line.expression, "operation": line.operation,
                "instead": line.instead, "right": line.at.line in truth,
            }  # fmt: skip
        except NoLine as error:
            row |= {"line": 0, "reason": str(error), "right": False}
        return {**row, "seconds": round(time.perf_counter() - began, 2)}


def row_of(fault: Fault) -> Row:
    """The row of one fault, from a child process."""
    words = [sys.executable, str(HERE / "lines.py"), "--one", fault.key]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, env=environment, check=False
        )
        row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        row = {"fault": fault.key, "backend": fault.backend, "author": fault.host.author, "line": 0, "right": False,
               "seconds": 0.0, "reason": f"the process gave no answer ({type(error).__name__})"}  # fmt: skip
    return row


def table(rows: Iterable[Row]) -> str:
    """Rates by source and author, in Markdown."""
    rows = list(rows)
    lines = [
        "| source | faults | a line is named | it is the faulty one | it is another one | seconds (median) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in (*SOURCES, "goldsmith", "stranger", "all"):
        own = [r for r in rows if name in (r["backend"], r["author"], "all")]
        if not own:
            continue
        named = [r for r in own if r["line"]]
        right = [r for r in own if r["right"]]
        seconds = sorted(r["seconds"] for r in own)[len(own) // 2]
        lines.append(
            f"| {name} | {len(own)} | {_share(named, own)} | {_share(right, own)} | {len(named) - len(right)} | "
            f"{seconds:.1f} |"
        )
    return "\n".join(lines)


def _share(some: Sequence[Row], of: Sequence[Row]) -> str:
    return f"{len(some)} ({100 * len(some) / len(of):.0f} %)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hosts or faults; all without")
    parser.add_argument("--out", type=Path, help="the file of rows")
    parser.add_argument("--sample", type=int, help="that many faults, the same each time")
    parser.add_argument("--seed", type=int, default=27, help="of the sample")
    parser.add_argument("--author", choices=("goldsmith", "stranger"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(examined(options.one)))
        return 0
    if options.out is None:
        parser.error("--out is missing: the file of rows")
    rows = [json.loads(s) for s in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {r["fault"] for r in rows}
    faults = chosen(options.names, options.sample, options.author, options.seed)
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as file:
        for row in pool.map(row_of, [f for f in faults if f.key not in known]):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    wanted = {f.key for f in faults}
    print(table(r for r in rows if r["fault"] in wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
