"""How often the assay rejects right kernels, and accepts wrong ones: `python -m benchmarks.assay.rates`.

(a) `--runs` checks of right kernels, drawn at random with legal summation orders (right_kernels/): none may fail.
(b) Every wrong kernel of wrong_kernels/ must fail under each of `--seeds` seeds; every right twin must pass.

`--keep FILE` keeps finished checks as they come, so that Ctrl-C loses nothing and a second call continues. Exit status
1 where a right kernel fails or a wrong one passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from ..intervals import wilson


def _prepare() -> None:
    """Use one thread per process, and silence torch's warnings about these kernels."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def clean_run(seed: int) -> dict:
    """Check one right kernel, drawn at random; returns a row."""
    from goldsmith import assay

    from .right_kernels import draws

    started = time.perf_counter()
    target, words = draws.draw(seed)
    report = assay.check(target, seed=seed, raises=False)
    return {
        "kind": "clean", "id": str(seed), "what": words, "wanted": "pass", "verdict": report.verdict,
        "findings": _findings(report), "seconds": time.perf_counter() - started,
        "notes": dict(Counter(n.id for n in report.notes)), "runs": report.environment["runs"]["candidate"],
    }  # fmt: skip


def wrong_run(index: int, seed: int) -> dict:
    """Check one wrong kernel (or a right twin) under one seed; returns a row."""
    from goldsmith import assay

    from .wrong_kernels.kernels import KERNELS

    kernel = KERNELS[index]
    started = time.perf_counter()
    report = assay.check(kernel.target(), seed=seed, raises=False)
    return {
        "kind": "twin" if kernel.right else "wrong", "id": f"{kernel.name} seed {seed}", "fault": kernel.id,
        "host": kernel.host, "what": kernel.what, "wanted": "pass" if kernel.right else kernel.fault,
        "verdict": report.verdict, "findings": _findings(report), "seconds": time.perf_counter() - started,
        "runs": report.environment["runs"]["candidate"],
    }  # fmt: skip


def _findings(report) -> list[str]:
    return [f"{f.rung} {f.probe} {f.tensor}: {f.text} [{f.case}]" for f in report.findings]


def main() -> int:
    arguments = _arguments()
    kept = _kept(arguments.keep)
    rows = list(kept.values())
    jobs = [job for job in _jobs(arguments) if job[0] not in kept]
    interrupted = False
    try:
        for row in _progress(_results(jobs, arguments.workers), len(jobs)):
            rows.append(row)
            if arguments.keep:
                with arguments.keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    summary = summarise(rows, interrupted)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        notable = [r for r in rows if r["kind"] != "clean" or r["verdict"] != "pass" or r["findings"]]
        arguments.json.write_text(json.dumps({"summary": summary, "rows": notable}, indent=1) + "\n")
    show(rows, summary)
    return 1 if summary["false_alarms"] or summary["escapes"] or summary["twins_accused"] else 0


Job = tuple[tuple[str, str], tuple[int, ...]]


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """The checks to run: ((kind, id), arguments)."""
    from .wrong_kernels.kernels import KERNELS

    jobs: list[Job] = [(("clean", str(s)), (s,)) for s in range(arguments.seed, arguments.seed + arguments.runs)]
    for index, kernel in enumerate([] if arguments.clean_only else KERNELS):
        kind = "twin" if kernel.right else "wrong"
        jobs += [((kind, f"{kernel.name} seed {s}"), (index, s)) for s in range(arguments.seeds)]
    return jobs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="checks of right kernels drawn at random (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the right kernels; the next ones follow it")
    parser.add_argument("--seeds", type=int, default=3, help="checks of every wrong kernel (default 3)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--clean-only", action="store_true", help="leave the wrong kernels out")
    parser.add_argument("--json", type=Path, help="write the summary, and the rows with findings, to this file")
    parser.add_argument("--keep", type=Path, help="append finished rows to this file, and continue from it")
    return parser.parse_args()


def _kept(path: Path | None) -> dict[tuple[str, str], dict]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {(r["kind"], r["id"]): r for r in rows}


def _run(job: Job) -> dict:
    (kind, _), seconds = job
    return clean_run(*seconds) if kind == "clean" else wrong_run(*seconds)


def _results(jobs: list[Job], workers: int) -> Iterator[dict]:
    if workers <= 1:
        _prepare()
        yield from map(_run, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        futures = [pool.submit(_run, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _progress(results: Iterable[dict], total: int) -> Iterator[dict]:
    """Show a progress bar on a terminal; elsewhere, print a line per tenth of the checks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("checks", total=total)
        for done, row in enumerate(results, 1):
            bar.update(task, advance=1, description=row["what"].split(" [")[0][:40])
            if not console.is_terminal and (done * 10 // total) != (done - 1) * 10 // total:
                print(f"{done} of {total} checks", file=sys.stderr, flush=True)
            yield row


def summarise(rows: list[dict], interrupted: bool) -> dict:
    """Counts, and rates with 95 % Wilson intervals."""
    import torch

    from goldsmith.cli.bench.rows import commit

    clean, wrong, twins = ([r for r in rows if r["kind"] == kind] for kind in ("clean", "wrong", "twin"))
    alarms, escapes, accused = (sum(r["verdict"] != r["wanted"] for r in part) for part in (clean, wrong, twins))
    seconds = sorted(r["seconds"] for r in rows)
    return {
        "command": "python -m benchmarks.assay.rates " + " ".join(_requested(sys.argv[1:])),
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "clean_runs": len(clean),
        "false_alarms": alarms,
        "false_alarm_rate_95": wilson(alarms, len(clean)),
        "quality_remarks": sum(any(f.startswith("QUALITY") for f in r["findings"]) for r in clean),
        "clean_by": {k: dict(Counter(_drawn(r)[k] for r in clean)) for k in ("operator", "dtype", "order", "layout")},
        "wrong_kernels": len({r["id"].rsplit(" seed ")[0] for r in wrong}),
        "wrong_checks": len(wrong),
        "escapes": escapes,
        "detection_rate_95": wilson(len(wrong) - escapes, len(wrong)),
        "twin_checks": len(twins),
        "twins_accused": accused,
        "median_seconds": seconds[len(seconds) // 2] if seconds else None,
        "seconds": sum(seconds),
        "interrupted": interrupted,
    }


def _requested(arguments: list[str]) -> list[str]:
    """The command's arguments without --keep, which does not change what is measured."""
    kept = [i for i, a in enumerate(arguments) if a == "--keep"]
    return [a for i, a in enumerate(arguments) if i not in kept and i - 1 not in kept]


def _drawn(row: dict) -> dict[str, str]:
    """The fields of a description by right_kernels.draws: operator dtype {shapes} order layout scale."""
    head, tail = row["what"].split(" {")[0].split(), row["what"].split("} ")[1].split()
    return {"operator": head[0], "dtype": head[1], "order": tail[0], "layout": tail[1]}


def show(rows: list[dict], summary: dict) -> None:
    """Print every wrong kernel with the findings that caught it, then every failure with its evidence."""
    kernels: dict[tuple[str, str, str], list[dict]] = {}
    for row in (r for r in rows if r["kind"] != "clean"):
        kernels.setdefault((row["fault"], row["host"], row["what"]), []).append(row)
    for (fault, host, what), checks in kernels.items():
        good = sum(r["verdict"] == r["wanted"] for r in checks)
        seen = list(dict.fromkeys(" ".join(f.split()[:2]) for r in checks for f in r["findings"]))
        print(f"{good}/{len(checks)}  {fault:<4} {host:<12} {what[:60]:<60} {', '.join(seen) or 'passes'}")
    for row in (r for r in rows if r["verdict"] != r["wanted"]):
        kind = "ESCAPE" if row["kind"] == "wrong" else "ALARM"
        print(f"{kind}  {row['id']}: {row['what']}: {row['verdict']}")
        print("".join(f"       {f}\n" for f in row["findings"][:4]), end="")
    s = summary
    caught = s["wrong_checks"] - s["escapes"]
    print(f"{s['false_alarms']} false alarms in {s['clean_runs']} clean runs{_rate(s['false_alarm_rate_95'])}", end="")
    print(f"; {s['quality_remarks']} with a remark on quality")
    print(f"{caught} of {s['wrong_checks']} checks of {s['wrong_kernels']} wrong kernels caught", end="")
    print(f"{_rate(s['detection_rate_95'])}; {s['twins_accused']} of {s['twin_checks']} checks of right twins accused")
    print(f"{s['seconds']:.0f} s in all, median {s['median_seconds'] or 0:.2f} s a check; {s['machine']}")
    if s["interrupted"]:
        print("interrupted: these figures count the finished checks")


def _rate(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" (95 %: {interval[0]:.2%} to {interval[1]:.2%})"


if __name__ == "__main__":
    sys.exit(main())
