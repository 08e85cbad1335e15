"""KernelFault: how well the assay detects and diagnoses known faults in kernels, and what it says of right kernels.

    python -m benchmarks.kernelfault [--fault M04] [--host H] [--backend B] [--author A] [--device cuda]
        [--seeds 5] [--clean 3000] [--baselines] [--quick] [--diagnose] [--report] [--jobs N]
        [--keep FILE] [--json F] [--html F] [--fit]

Rows are appended to a file as they come (in build/kernelfault/ without --keep), so Ctrl-C and kill -9 lose nothing: the
same command continues where the last one stopped. Exit status: 0 every fault found and no false alarm, 1 otherwise,
2 the command cannot run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import catalogue, figures, runner, terminal
from .catalogue import HERE

INTERRUPTED = 130
ON_A_GPU = "triton"  # the backend whose faults also run on a GPU


def main(arguments: list[str] | None = None) -> int:
    options = _arguments().parse_args(arguments)
    try:
        faults = catalogue.select(options.fault, options.host, options.backend, options.author)
    except catalogue.CatalogueError as error:
        print(error, file=sys.stderr)
        return 2
    if not faults:
        print("no fault fits all of these options; leave out --fault, --host, --backend or --author.", file=sys.stderr)
        return 2
    if options.device != "cpu":
        reason = _refused(options, faults)
        if reason:
            print(reason, file=sys.stderr)
            return 2
        faults = [f for f in faults if f.backend == ON_A_GPU]
    for message in catalogue.unfit(faults):  # reported now, not after hours; the others run
        print(f"{message}\nThis fault cannot run until its edit fits again.", file=sys.stderr)
    if options.diagnose:
        return _diagnosed([f for f in faults if f.id == options.fault] or faults, options.device, options.html)
    narrowed = any((options.fault, options.host, options.backend, options.author, options.device != "cpu"))
    clean = options.clean if options.clean is not None else 0 if narrowed else 3000
    selection = runner.Selection(
        tuple(faults), runner.everything(faults, options.host, options.backend), options.seeds, clean,
        options.baselines, options.quick, options.device,
    )  # fmt: skip
    digest = runner.digest(selection)
    keep = options.keep or catalogue.ROOT / "build" / "kernelfault" / f"{digest}.jsonl"
    kept = runner.KeptRows(keep)
    if not kept.belongs(digest):
        print(
            f"{keep} holds rows of another state of the assay, or of other options; name another file.", file=sys.stderr
        )
        return 2
    status = 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if not options.report:
            kept.add({"run": conditions(selection, arguments)})
            terminal.progress(runner.run(selection, kept, options.jobs), len(selection.jobs()))
    except KeyboardInterrupt:
        print(f"interrupted; finished rows are in {keep}, and the same command continues.", file=sys.stderr)
        status = INTERRUPTED
    except runner.Broken as error:
        print(f"{error}\nFinished rows are in {keep}.", file=sys.stderr)
        status = 2
    summary = figures.summarise(_wanted(kept.rows, selection))
    summary["conditions"] = {**measured_under(kept.rows, selection, arguments), "load": figures.loads(kept.rows)}
    terminal.print_summary(summary)
    if options.json:
        _write(options.json, json.dumps(summary, indent=1) + "\n")
    if options.html:
        from . import page

        _write(options.html, page.render(summary))
    if options.fit:
        from . import calibration, likelihood

        print(calibration.write(_wanted(kept.rows, selection)))
        likelihood.keep(_wanted(kept.rows, selection))
        print(likelihood.write())
    return status or terminal.status(summary)


def _refused(options: argparse.Namespace, faults: list[runner.Fault]) -> str:
    """Why nothing can run on that device, or ""."""
    import torch

    if not any(f.backend == ON_A_GPU for f in faults):
        return (
            f"--device {options.device}: none of these faults is in a Triton kernel; other faults run on the CPU only."
        )
    if options.baselines or options.clean:
        return f"--device {options.device}: --baselines and --clean run on the CPU only; leave them out."
    if not torch.cuda.is_available():
        return f"--device {options.device}: torch sees no GPU here; without the option, Triton kernels are interpreted."
    return ""


def _diagnosed(faults: list[runner.Fault], device: str, page: Path | None) -> int:
    """Print each fault's diagnosis as its kernel's author would see it; returns 1 where one misses stage or cause."""
    if page is not None and len(faults) > 1:
        print(f"--html writes the page of one diagnosis, but {len(faults)} faults are chosen.", file=sys.stderr)
        return 2
    status = 0
    for fault in faults:
        words = [str(HERE / "one_fault.py"), fault.key, device, *([str(page)] if page is not None else [])]
        done = subprocess.run([sys.executable, *words], env=runner.environment(device), check=False)
        status = max(status, 1 if done.returncode else 0)
    return status


def _interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that the child processes end too."""
    raise KeyboardInterrupt


def _wanted(rows: list[dict], selection: runner.Selection) -> list[dict]:
    """The kept rows that the command asks for."""
    jobs = selection.jobs()
    wanted = {(job["name"], job["of"]) for job in jobs if job["kind"] != "clean"}
    clean = {job["of"] for job in jobs if job["kind"] == "clean"}
    return [
        r for r in rows
        if "seed" in r and ((r["kind"] == "clean" and r["seed"] < selection.clean and r["of"] in clean)
                            or ((r["job"], r["of"]) in wanted and r["seed"] < selection.seeds))
    ]  # fmt: skip


def conditions(selection: runner.Selection, arguments: list[str] | None) -> dict:
    """Machine, versions, commit and options of this run."""
    import torch

    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    words = " ".join(sys.argv[1:] if arguments is None else arguments)
    return {
        "command": f"python -m benchmarks.kernelfault {words}".strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores" + _gpu(selection.device),
        "commit": commit(),
        "torch": torch.__version__.split("+")[0],
        "triton": version,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seeds": selection.seeds,
        "quick": selection.quick,
    }


def measured_under(rows: list[dict], selection: runner.Selection, arguments: list[str] | None) -> dict:
    """The conditions of the last run that added rows; those of this run where no row has any.

    A tree without git does not know its commit. Then the commit is that of the reader, at the same state of the assay.
    """
    runs = [row["run"] for row in rows if "run" in row]
    last = runs[-1] if runs else conditions(selection, arguments)
    return {**last, "commit": last["commit"] or commit(), "seeds": selection.seeds}


def _gpu(device: str) -> str:
    import torch

    return "" if device == "cpu" else f", {torch.cuda.get_device_name()}"


def commit() -> str:
    """The measured commit, with + where files differ from it; "" outside a git checkout."""
    from goldsmith.cli.bench.rows import commit as package_commit

    return package_commit()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernelfault",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fault", metavar="ID", help="only this fault: M04, or M04b (default: all)")
    parser.add_argument("--host", metavar="H", help="only faults in this host")
    parser.add_argument("--backend", metavar="B", help="only faults in this backend: torch, triton, reference")
    parser.add_argument(
        "--author", metavar="A", help="only faults by this author: goldsmith, or stranger (who had not read the rules)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: faults of Triton kernels, compiled for it (default cpu: interpreted)")  # fmt: skip
    parser.add_argument("--seeds", type=_positive, default=5, metavar="N", help="seeds of every fault (default 5)")
    parser.add_argument(
        "--clean", type=int, metavar="N",
        help="runs of right kernels drawn at random (default 3000; 0 where faults are narrowed down)",
    )  # fmt: skip
    parser.add_argument(
        "--baselines", action="store_true", help="also ask the usual rules (assert_close, gradcheck, ...)"
    )
    parser.add_argument("--quick", action="store_true", help="one case of every fault")
    parser.add_argument(
        "--diagnose", action="store_true", help="print the diagnosis of each chosen fault, without rates"
    )
    parser.add_argument("--jobs", type=_positive, default=max(1, (os.cpu_count() or 2) - 1), metavar="N",
                        help="processes at a time (default: all cores but one)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep rows in this file, and continue from it")
    parser.add_argument(
        "--report", action="store_true", help="print the figures of the kept rows, without running anything"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--fit", action="store_true",
                        help="fit calibration.json and likelihood.json, from development faults only")  # fmt: skip
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value
