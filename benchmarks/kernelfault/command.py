"""KernelFault: what the assay says of kernels with known faults, and of kernels without any.

    python -m benchmarks.kernelfault [--fault M04] [--host H] [--backend B] [--author A] [--device cuda]
        [--seeds 5] [--clean 3000] [--baselines] [--quick] [--diagnose] [--report] [--jobs N]
        [--keep FILE] [--json F] [--html F] [--fit]

Rows are appended to a file as they come (build/kernelfault/ without --keep): Ctrl-C and kill -9 lose nothing, and the
same command goes on where the last one stopped. Exit status: 0 every fault found and no false alarm, 1 otherwise,
2 the command cannot be carried out, 130 interrupted.
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
ON_A_GPU = "triton"  # faults of this backend run on a GPU, too


def main(given: list[str] | None = None) -> int:
    asked = _arguments().parse_args(given)
    try:
        faults = catalogue.select(asked.fault, asked.host, asked.backend, asked.author)
    except catalogue.CatalogueError as error:
        print(error, file=sys.stderr)
        return 2
    if not faults:
        print("no fault has all of that; leave out --fault, --host, --backend or --author.", file=sys.stderr)
        return 2
    if asked.device != "cpu":
        said = _refused(asked, faults)
        if said:
            print(said, file=sys.stderr)
            return 2
        faults = [f for f in faults if f.backend == ON_A_GPU]
    for said in catalogue.unfit(faults):  # told now, and not after hours; the others are run all the same
        print(f"{said}\nThis fault cannot be run until its edit fits again.", file=sys.stderr)
    if asked.diagnose:
        return _diagnosed([f for f in faults if f.id == asked.fault] or faults, asked.device, asked.html)
    narrowed = any((asked.fault, asked.host, asked.backend, asked.author, asked.device != "cpu"))
    clean = asked.clean if asked.clean is not None else 0 if narrowed else 3000
    plan = runner.Plan(
        tuple(faults), runner.everything(faults, asked.host, asked.backend), asked.seeds, clean, asked.baselines,
        asked.quick, asked.device,
    )  # fmt: skip
    digest = runner.digest(plan)
    keep = asked.keep or catalogue.ROOT / "build" / "kernelfault" / f"{digest}.jsonl"
    kept = runner.Kept(keep)
    if not kept.belongs(digest):
        print(
            f"{keep} holds rows of another state of the assay, or of other options; name another file.", file=sys.stderr
        )
        return 2
    status = 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        if not asked.report:
            kept.add({"run": conditions(plan, given)})
            terminal.progress(runner.run(plan, kept, asked.jobs), len(plan.jobs()))
    except KeyboardInterrupt:
        print(f"interrupted; what was finished is in {keep}, and the same command goes on.", file=sys.stderr)
        status = INTERRUPTED
    except runner.Broken as error:
        print(f"{error}\nWhat was finished is in {keep}.", file=sys.stderr)
        status = 2
    summary = figures.summarise(_wanted(kept.rows, plan))
    summary["conditions"] = {**made_where(kept.rows, plan, given), "load": figures.loads(kept.rows)}
    terminal.print_summary(summary)
    if asked.json:
        _write(asked.json, json.dumps(summary, indent=1) + "\n")
    if asked.html:
        from . import page

        _write(asked.html, page.render(summary))
    if asked.fit:
        from . import calibration, likelihood

        print(calibration.write(_wanted(kept.rows, plan)))
        likelihood.keep(_wanted(kept.rows, plan))
        print(likelihood.write())
    return status or terminal.status(summary)


def _refused(asked: argparse.Namespace, faults: list[runner.Fault]) -> str:
    """Why nothing can be run on that device, or ""."""
    import torch

    if not any(f.backend == ON_A_GPU for f in faults):
        return f"--device {asked.device}: none of these faults is in a Triton kernel; the others run on the CPU alone."
    if asked.baselines or asked.clean:
        return f"--device {asked.device}: --baselines and --clean are of the CPU; leave them out."
    if not torch.cuda.is_available():
        return f"--device {asked.device}: torch sees no GPU here; leave it out, and Triton kernels are interpreted."
    return ""


def _diagnosed(faults: list[runner.Fault], device: str, page: Path | None) -> int:
    """Each fault's diagnosis as its kernel's author would see it; 1 when one misses the stage or the cause."""
    if page is not None and len(faults) > 1:
        print(f"--html takes the page of one diagnosis, and {len(faults)} faults are chosen.", file=sys.stderr)
        return 2
    status = 0
    for fault in faults:
        words = [str(HERE / "one_fault.py"), fault.key, device, *([str(page)] if page is not None else [])]
        done = subprocess.run([sys.executable, *words], env=runner.environment(device), check=False)
        status = max(status, 1 if done.returncode else 0)
    return status


def _interrupt(number: int, frame: object) -> None:
    """Being told to end is as Ctrl-C: the child processes end, too."""
    raise KeyboardInterrupt


def _wanted(rows: list[dict], plan: runner.Plan) -> list[dict]:
    """Of the kept rows those that the command asks for."""
    jobs = plan.jobs()
    wanted = {(job["name"], job["of"]) for job in jobs if job["kind"] != "clean"}
    clean = {job["of"] for job in jobs if job["kind"] == "clean"}
    return [
        r for r in rows
        if "seed" in r and ((r["kind"] == "clean" and r["seed"] < plan.clean and r["of"] in clean)
                            or ((r["job"], r["of"]) in wanted and r["seed"] < plan.seeds))
    ]  # fmt: skip


def conditions(plan: runner.Plan, given: list[str] | None) -> dict:
    """Where and on what the figures were measured."""
    import torch

    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    words = " ".join(sys.argv[1:] if given is None else given)
    return {
        "command": f"python -m benchmarks.kernelfault {words}".strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores" + _gpu(plan.device),
        "commit": commit(),
        "torch": torch.__version__.split("+")[0],
        "triton": version,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seeds": plan.seeds,
        "quick": plan.quick,
    }


def made_where(rows: list[dict], plan: runner.Plan, given: list[str] | None) -> dict:
    """The conditions of the last run that made rows, not of who reads them; of this one where none says so.

    A tree without git does not know its commit: whoever reads the rows at the same state of the assay names theirs.
    """
    runs = [row["run"] for row in rows if "run" in row]
    made = runs[-1] if runs else conditions(plan, given)
    return {**made, "commit": made["commit"] or commit(), "seeds": plan.seeds}


def _gpu(device: str) -> str:
    import torch

    return "" if device == "cpu" else f", {torch.cuda.get_device_name()}"


def commit() -> str:
    """The commit that is measured, with + when files differ from it; nothing outside a checkout of git."""
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
    parser.add_argument("--author", metavar="A", help="only faults by: goldsmith, or stranger (had not read the rules)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: faults of Triton kernels, compiled for it (default cpu: interpreted)")  # fmt: skip
    parser.add_argument("--seeds", type=_positive, default=5, metavar="N", help="seeds of every fault (default 5)")
    parser.add_argument(
        "--clean", type=int, metavar="N",
        help="runs of right kernels drawn at random (default 3000; 0 where faults are narrowed down)",
    )  # fmt: skip
    parser.add_argument("--baselines", action="store_true", help="also what the usual rules say of the same kernels")
    parser.add_argument("--quick", action="store_true", help="one case of every fault")
    parser.add_argument("--diagnose", action="store_true", help="the diagnosis of each chosen fault, and no rates")
    parser.add_argument("--jobs", type=_positive, default=max(1, (os.cpu_count() or 2) - 1), metavar="N",
                        help="processes at a time (default: all cores but one)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep rows in this file, and go on from it")
    parser.add_argument("--report", action="store_true", help="the figures of the rows that are there, and no new ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--fit", action="store_true",
                        help="write the calibration, from development faults alone, and what looks say")  # fmt: skip
    return parser


def _positive(said: str) -> int:
    value = int(said)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {said}")
    return value
