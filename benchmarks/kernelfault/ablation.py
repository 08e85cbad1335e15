"""Ablation: the faults that each kind of changed golden explains, and those that no other kind explains.

    python -m benchmarks.kernelfault.ablation --out rows.jsonl [--sample N] [--author A] [--seconds 6] [NAME ...]

Each fault runs in its first case. The search for changes that make the first wrong tensor is the diagnosis' own; rules
and patches are left out. A row has the kinds of all changes that explain the tensor, the first cause, and whether that
is the true one. A run continues where the file ends; a fault that ended the process is left out then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import catalogue, lines, targets, worker
from .catalogue import ROOT, Fault

Row = dict[str, Any]


def row_of(fault: Fault, seconds: float) -> Row:
    import torch

    from goldsmith.assay.diagnosis.experiments.isolate import isolate, named
    from goldsmith.assay.diagnosis.search import search
    from goldsmith.assay.judge.examination import Examination
    from goldsmith.assay.probes import select, values

    row: Row = {"fault": fault.key, "explained": False}
    with tempfile.TemporaryDirectory(prefix="kernelfault-") as folder:
        target = targets.factory(
            fault.host, fault.backend, catalogue.copy(fault.host, fault.backend, fault, Path(folder))
        )()
        case = target.case((fault.cases or [c.name for c in target.cases])[0])
        dtype = getattr(torch, fault.dtype) if fault.dtype else target.dtypes[0]
        examination = Examination(target, case, dtype, "cpu", 0, select(("values",)), case.name)
        values.run(examination)
        table = isolate(examination)
        got = named(table.own).get(table.first_wrong or "", ("", None))[1] if table.own is not None else None
        if got is None or table.own is None:
            return row
        session = search(examination, table.first_wrong or "", got, table.own)
        if session is None:
            return row
        began = time.thread_time()
        ranked = session.run(lambda: time.thread_time() - began > seconds)
        found = session.explanations()
    if ranked:
        best = ranked[0]
        alike = [(c, w) for c, w in found if (w.exact, w.whole) == (best.exact, best.whole)]
        row |= {"explained": True, "cause": best.cause, "text": best.text, "true": best.cause in fault.causes}
        row["first"] = sorted({c.kind for c, w in alike if (w.cause, w.text) == (best.cause, best.text)})
        row["kinds"] = sorted({c.kind for c, _ in alike})
    return row


def table(rows: Iterable[Row]) -> list[str]:
    """Lines for people: kind, faults that it explains first, rightly, and alone."""
    first, right, alone = Counter[str](), Counter[str](), Counter[str]()
    count = explained = 0
    for row in rows:
        count, explained = count + 1, explained + row["explained"]
        for kind in row.get("first", ()):
            first[kind] += 1
            right[kind] += row["true"]
            alone[kind] += row["kinds"] == [kind]
    shown = [f"{explained} of {count} faults explained", f"{'kind':28}{'first':>7}{'right':>7}{'alone':>7}"]
    return shown + [f"{kind:28}{n:>7}{right[kind]:>7}{alone[kind]:>7}" for kind, n in first.most_common()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="hosts or faults; default: all")
    parser.add_argument("--out", type=Path, required=True, help="a file to which the rows are added")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--author", choices=("goldsmith", "stranger"))
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU seconds of a search, at most (default 6)")
    options = parser.parse_args(argv)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    worker.import_from(ROOT / "src")
    worker._quiet()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {row["fault"] for row in rows}
    with options.out.open("a", encoding="utf-8") as file:
        for fault in lines.chosen(options.names, options.sample, options.author):
            if fault.key in known or fault.together:
                continue
            file.write(json.dumps({"fault": fault.key, "begun": True}) + "\n")
            file.flush()
            try:
                row = row_of(fault, options.seconds)
            except Exception as error:  # noqa: BLE001 - a wrong kernel may raise anything
                row = {"fault": fault.key, "explained": False, "error": f"{type(error).__name__}: {error}"[:200]}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(*table(row for row in rows if "explained" in row), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
