"""Patch rates: for how many faults in Python or Triton sources a diagnosis finds an edit that makes the kernel pass.

    python -m benchmarks.kernelfault.patches --out rows.jsonl [--sample N] [--seconds S] [--author A] [NAME ...]

A row has the fault, the first causes, the patch as a diff, whether it restores the right kernel word for word, seconds.
A patch in other words needs a person, whose judgements are in `judgements.toml`. A run continues where the file ends.
The exit status is 1 if a judgement is missing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # the child process runs this file, whose folder must not be imported from
    sys.path[:1] = [str(Path(__file__).resolve().parents[2])]

from benchmarks.kernelfault import catalogue
from benchmarks.kernelfault.catalogue import HERE, ROOT, Fault

JUDGEMENTS = HERE / "judgements.toml"
SOURCES = ("torch", "triton")
LIMIT = 240.0  # seconds of one fault, with its check
Row = dict[str, Any]


def chosen(names: Sequence[str], sample: int | None, author: str | None) -> list[Fault]:
    """Faults whose source the search reads; a sample is the same each time."""
    known = [
        f for f in catalogue.faults()
        if f.counted and f.backend in SOURCES and not f.host.package and author in (None, f.host.author)
        and (not names or f.host.name in names or f.key in names)
    ]  # fmt: skip
    if sample is None or sample >= len(known):
        return known
    picked = set(random.Random(27).sample(range(len(known)), sample))
    return [f for n, f in enumerate(known) if n in picked]


def examined(key: str, seconds: float) -> Row:
    """The row of one fault, in this process."""
    fault = next(f for f in catalogue.faults() if f.key == key)
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        path = catalogue.copy(fault.host, fault.backend, fault, Path(folder))
        from benchmarks.kernelfault import targets
        from goldsmith import assay

        target = targets.factory(fault.host, fault.backend, path)()
        dtype = getattr(torch, fault.dtype) if fault.dtype else None
        case = fault.cases[0] if fault.cases else None
        diagnosis = assay.diagnose(target, case, dtype=dtype, seed=0, budget_s=seconds, patch=True)
        row: Row = {"fault": key, "backend": fault.backend, "author": fault.host.author, "verdict": diagnosis.verdict}
        row |= {"seconds": round(diagnosis.seconds, 1), "causes": [c.id for c in diagnosis.causes[:3]]}
        row["line"] = 0 if diagnosis.line is None else diagnosis.line.at.line
        row["reason"] = next((s for s in diagnosis.traced if s.startswith("No patch")), diagnosis.partial)
        if diagnosis.patch is not None:
            patch = diagnosis.patch
            row["tried"] = patch.tried
            right = (ROOT / fault.file).read_text(encoding="utf-8")
            row |= {
                "diff": patch.diff.replace(folder + "/", ""), "kind": patch.kind, "remaining": list(patch.remaining),
                "doubtful": patch.doubtful,
                "restored": ast.dump(ast.parse(patch.text)) == ast.dump(ast.parse(right)),
            }  # fmt: skip
        return row


def row_of(fault: Fault, seconds: float) -> Row:
    """The row of one fault, from a child process."""
    began = time.perf_counter()
    words = [sys.executable, str(HERE / "patches.py"), "--one", fault.key, "--seconds", str(seconds)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT, check=False)
        row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        row = {"fault": fault.key, "backend": fault.backend, "author": fault.host.author, "verdict": "fail",
               "reason": f"the process gave no answer ({type(error).__name__})"}  # fmt: skip
    return {**row, "whole": round(time.perf_counter() - began, 1)}


def mark(diff: str) -> str:
    """A short name for a diff, without its context lines."""
    lines = [s for s in diff.splitlines() if s[:1] in "+-" and s[:3] not in ("+++", "---")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def judgement(row: Row, judged: dict[str, dict[str, str]]) -> str:
    """ "", "right", "wrong", "open", or "doubtful" where the search itself says that it may stand for another edit."""
    if "diff" not in row:
        return ""
    if row.get("doubtful"):
        return "doubtful"
    return "right" if row["restored"] else judged.get(f"{row['fault']} {mark(row['diff'])}", {}).get("is", "open")


def judgements() -> dict[str, dict[str, str]]:
    """ "fault mark" -> {"is": "right" or "wrong", "why": a sentence}."""
    if not JUDGEMENTS.exists():
        return {}
    listed = tomllib.loads(JUDGEMENTS.read_text(encoding="utf-8")).get("patch", ())
    return {f"{entry['fault']} {entry['mark']}": entry for entry in listed}


def table(rows: Iterable[Row]) -> str:
    """Rates by backend, in Markdown."""
    rows, judged = list(rows), judgements()
    lines = [
        "| source | faults | patch found | right | wrong | doubtful | seconds (median) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in (*SOURCES, "all"):
        own = [r for r in rows if name in (r["backend"], "all")]
        every = [judgement(r, judged) for r in own if "diff" in r]
        found = [j for j in every if j != "doubtful"]
        taken = sorted(r["seconds"] for r in own if "diff" in r)
        if own:
            share = f"{len(found)} ({100 * len(found) / len(own):.0f} %)"
            median = f"{taken[len(taken) // 2]:.1f}" if taken else "-"
            counts = f"{found.count('right')} | {found.count('wrong')} | {every.count('doubtful')}"
            lines.append(f"| {name} | {len(own)} | {share} | {counts} | {median} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hosts or faults; all without")
    parser.add_argument("--out", type=Path, help="the file of rows")
    parser.add_argument("--sample", type=int, help="that many faults, the same each time")
    parser.add_argument("--author", choices=("goldsmith", "stranger"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of a diagnosis: the default budget")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(examined(options.one, options.seconds)))
        return 0
    if options.out is None:
        parser.error("--out is missing: the file of rows")
    rows = [json.loads(s) for s in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {r["fault"] for r in rows}
    faults = chosen(options.names, options.sample, options.author)
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as file:
        for row in pool.map(lambda f: row_of(f, options.seconds), [f for f in faults if f.key not in known]):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    wanted = {f.key for f in faults}
    rows, judged = [r for r in rows if r["fault"] in wanted], judgements()
    print(table(rows))
    unjudged = [r for r in rows if judgement(r, judged) == "open"]
    for row in unjudged:
        print(f"\n{row['fault']} {mark(row['diff'])}\n{row['diff']}")
    return 1 if unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
