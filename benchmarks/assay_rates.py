"""False alarms on right kernels, and what catches wrong ones: `python benchmarks/assay_rates.py [--runs 1000]`.

(a) `--runs` clean, randomised checks over legal summation orders: none may fail.
(b) Every wrong kernel of assay_wrong.py must fail; every right twin must pass.

Finished runs are kept in `--keep FILE` as they come (Ctrl-C loses nothing), and a second call goes on where the first
stopped. Exit status 1 when there is a false alarm or an escape.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]


def _prepare() -> None:
    """One thread per process; what torch warns about on purpose-built kernels is not news."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def clean_run(seed: int) -> dict:
    """One clean check as a row."""
    import assay_clean
    from goldsmith import assay

    started = time.perf_counter()
    target, words = assay_clean.draw(seed)
    report = assay.check(target, seed=seed, raises=False)
    return {
        "kind": "clean", "id": seed, "what": words, "verdict": report.verdict, "findings": _findings(report),
        "seconds": time.perf_counter() - started, "notes": dict(Counter(n.id for n in report.notes)),
    }  # fmt: skip


def wrong_run(index: int, seed: int = 0) -> dict:
    """One wrong kernel (or its right twin) as a row."""
    import assay_wrong
    from goldsmith import assay

    kernel = assay_wrong.load()[index]
    started = time.perf_counter()
    report = assay.check(kernel.target(), seed=seed, raises=False)
    wanted = "pass" if kernel.right else kernel.fault
    return {
        "kind": "wrong", "id": f"{index}", "fault": kernel.id, "host": kernel.host, "what": kernel.what,
        "wanted": wanted, "verdict": report.verdict, "findings": _findings(report),
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _findings(report) -> list[str]:
    return [f"{f.rung} {f.probe} {f.tensor}: {f.text} [{f.case}]" for f in report.findings]


# driving


def main() -> int:
    arguments = _arguments()
    import assay_wrong

    jobs = [("clean", arguments.seed + i) for i in range(arguments.runs)]
    if not arguments.clean_only:
        jobs += [("wrong", i) for i in range(len(assay_wrong.load()))]
    done = _kept(arguments.keep)
    jobs = [j for j in jobs if (j[0], str(j[1])) not in done]
    rows = list(done.values())
    started = time.perf_counter()
    interrupted = False
    try:
        for row in _progress(_results(jobs, arguments.workers), len(jobs)):
            rows.append(row)
            if arguments.keep:
                with arguments.keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    summary = summarise(rows, time.perf_counter() - started, interrupted)
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")
    show(rows, summary)
    return 1 if summary["false_alarms"] or summary["escapes"] or summary["right_twins_accused"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="clean randomised checks (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the clean runs take this seed and those after it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--clean-only", action="store_true", help="leave the wrong kernels out")
    parser.add_argument("--json", type=Path, help="write summary and rows to this file")
    parser.add_argument("--keep", type=Path, help="append finished rows to this file, and go on from it")
    return parser.parse_args()


def _kept(path: Path | None) -> dict[tuple[str, str], dict]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {(r["kind"], str(r["id"])): r for r in rows}


def _results(jobs: list[tuple[str, int]], workers: int):
    run = {"clean": clean_run, "wrong": wrong_run}
    if workers <= 1:
        _prepare()
        for kind, which in jobs:
            yield run[kind](which)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        futures = [pool.submit(run[kind], which) for kind, which in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _progress(results, total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("checks", total=total)
        for row in results:
            bar.update(task, advance=1, description=row["what"].split(" [")[0][:40])
            yield row


# what came out


def summarise(rows: list[dict], seconds: float, interrupted: bool) -> dict:
    """Counts, with the 95 % upper bound on the rate of false alarms."""
    import torch

    clean = [r for r in rows if r["kind"] == "clean"]
    wrong = [r for r in rows if r["kind"] == "wrong"]
    faulty = [r for r in wrong if r["wanted"] != "pass"]
    alarms = [r for r in clean if r["verdict"] != "pass"]
    return {
        "clean_runs": len(clean),
        "false_alarms": len(alarms),
        "upper_bound_95": wilson_upper(len(alarms), len(clean)),
        "quality_remarks": sum(any(f.startswith("QUALITY") for f in r["findings"]) for r in clean),
        "wrong_kernels": len(faulty),
        "escapes": sum(r["verdict"] != r["wanted"] for r in faulty),
        "right_twins": len(wrong) - len(faulty),
        "right_twins_accused": sum(r["verdict"] != "pass" for r in wrong if r["wanted"] == "pass"),
        "median_seconds": sorted(r["seconds"] for r in rows)[len(rows) // 2] if rows else None,
        "seconds": seconds,
        "interrupted": interrupted,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }


def wilson_upper(hits: int, n: int, z: float = 1.96) -> float | None:
    """Upper end of the 95 % Wilson interval"""
    if n == 0:
        return None
    share = hits / n
    centre = share + z * z / (2 * n)
    return (centre + z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))) / (1 + z * z / n)


def show(rows: list[dict], summary: dict) -> None:
    """The tables as plain text."""
    for row in (r for r in rows if r["kind"] == "wrong"):
        seen = list(dict.fromkeys(" ".join(f.split()[:2]) for f in row["findings"]))
        state = "ok    " if row["verdict"] == row["wanted"] else "ESCAPE" if row["wanted"] != "pass" else "ALARM "
        print(f"{state} {row['fault']:<4} {row['host']:<12} {row['what'][:58]:<58} {', '.join(seen) or row['verdict']}")
    for row in rows:
        if row["kind"] == "clean" and row["verdict"] != "pass":
            print(f"ALARM  seed {row['id']}: {row['what']}\n       " + "\n       ".join(row["findings"][:4]))
    bound = summary["upper_bound_95"]
    print(
        f"{summary['false_alarms']} false alarms in {summary['clean_runs']} clean runs"
        + ("" if bound is None else f" (rate below {bound:.2%} at 95 %)")
        + f"; {summary['quality_remarks']} of them with a remark on quality\n"
        f"{summary['wrong_kernels'] - summary['escapes']} of {summary['wrong_kernels']} wrong kernels caught; "
        f"{summary['right_twins_accused']} of {summary['right_twins']} right twins accused\n"
        f"{summary['seconds']:.0f} s, median {summary['median_seconds'] or 0:.2f} s a check, {summary['machine']}"
        + (" (interrupted: what was finished is counted)" if summary["interrupted"] else "")
    )


if __name__ == "__main__":
    sys.exit(main())
