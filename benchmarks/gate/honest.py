"""`assay.check` of every right candidate, with all probes, in this process.

    python -m benchmarks.gate.honest [NAME ...]

Prints a line for each candidate, and the report of each that fails. The exit status is 1 if one fails.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from goldsmith import assay

from . import specimens


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    failing = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for specimen in specimens.specimens(specimens.RIGHT):
        if names and not {specimen.name, specimen.path.stem, specimen.problem.partition("_")[2]} & set(names):
            continue
        if missing := specimen.missing(device):
            print(f"{specimen.name:40} needs {' and '.join(missing)}", flush=True)
            continue
        started = time.perf_counter()
        report = assay.check(specimens.target(specimen), raises=False)
        print(f"{specimen.name:40} {report.verdict:10} {time.perf_counter() - started:5.1f} s", flush=True)
        if not report.ok:
            failing.append(specimen.name)
            print(report, flush=True)
    print(f"{len(failing)} fail: {', '.join(failing)}" if failing else "all pass")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
