"""Runs the jobs in child processes, and keeps rows as they come.

A child process takes one job after another. Faults that corrupt memory, and operators of goldsmith, get a process of
their own.

Each row is appended to a JSON-lines file at once, so that finished rows survive any end of the run. The same command
continues where the last one stopped, as long as neither faults nor library have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goldsmith.core.json_values import JsonRows

from . import catalogue
from .catalogue import HERE, ROOT, Fault, Host

ROW_LIMIT = 900.0  # seconds for one row
_BATCH = 50  # clean runs of a job
_RESTARTS = 40
_SPOILS = {"overrun", "stray_read", "use_after_free", "invalid_index", "off_by_one", "wrong_mask", "wrong_stride"}


class Broken(RuntimeError):
    """A child process failed through a bug of the harness; the message is its stderr."""


@dataclass(frozen=True)
class Selection:
    """The faults, hosts and options of one command."""

    faults: tuple[Fault, ...]
    hosts: tuple[tuple[Host, str], ...]
    seeds: int = 5
    clean: int = 3000
    baselines: bool = False
    quick: bool = False
    device: str = "cpu"

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs: every fault, every host without a fault, and the clean runs in batches."""
        common = {"seeds": self.seeds, "baselines": self.baselines, "quick": self.quick, "device": self.device}
        jobs = [
            {"name": f.key, "of": made_of(f.host, f.backend, f), "kind": "fault", "host": f.host.name,
             "backend": f.backend, "fault": f.key, **common,
             "alone": bool(f.host.package) or bool(_SPOILS & set(f.causes))}
            for f in self.faults
        ]  # fmt: skip
        jobs += [
            {"name": f"{h.name} {b}", "of": made_of(h, b), "kind": "twin", "host": h.name, "backend": b, "fault": None,
             **common, "alone": bool(h.package)}
            for h, b in self.hosts
        ]  # fmt: skip
        clean = _hashed(sorted((ROOT / "benchmarks" / "assay" / "right_kernels").glob("*.py")))
        for first in range(0, self.clean, _BATCH):
            drawn = list(range(first, min(first + _BATCH, self.clean)))
            name = f"clean {drawn[0]}..{drawn[-1]}"
            jobs.append({"name": name, "of": clean, "kind": "clean", "draws": drawn, "alone": False, "device": "cpu"})
        return jobs


def digest(selection: Selection) -> str:
    """A hash of the assay, of the harness that runs it, and of the options (but not the number of seeds or runs).

    `made_of` hashes the sources of a single job, so that a new fault or another operator invalidates no other rows.
    calibration.json is left out, because it does not change the order of causes; likelihood.json does.
    """
    assay = ROOT / "src" / "goldsmith" / "assay"
    files = [p for p in sorted(assay.rglob("*.py")) if "html" not in p.relative_to(assay).parts]
    files += [assay / "diagnosis" / "causes" / "likelihood.json"]
    files += [HERE / name for name in ("baselines.py", "baseline_names.py", "targets.py", "worker.py")]
    elsewhere = "" if selection.device == "cpu" else f" {selection.device}"
    return _hashed(files, f"{selection.baselines} {selection.quick}{elsewhere}")


def made_of(host: Host, backend: str, fault: Fault | None = None) -> str:
    """A hash of the host's sources, the fault's edits and the cases tried, but not of the truth about the fault."""
    if host.package:
        package = ROOT / "src" / "goldsmith"
        folders = [package / "core", package.joinpath(*host.package.split(".")[1:-1])]
        files = [p for folder in folders for p in sorted(folder.rglob("*.py"))] + [package / "cli" / "targets.py"]
        if backend == catalogue.NATIVE:
            files += [p for p in sorted((ROOT / catalogue.NATIVE_SOURCES).rglob("*")) if p.suffix in (".h", ".cpp")]
    else:
        files = [ROOT / host.backends[backend]]
    key = (host.cases, fault.cases, fault.dtype, fault.together, fault.edits) if fault is not None else host.cases
    return _hashed(files, repr(key))


def _hashed(files: list[Path], words: str = "") -> str:
    digest = hashlib.sha256(words.encode())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class KeptRows(JsonRows):
    """Rows of jobs, which several threads may add."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self._lock = threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            super().add(row)

    def of(self, job: dict[str, Any]) -> list[dict]:
        """The job's rows; rows from before a change of its host or fault are ignored."""
        return [r for r in self.rows if (r.get("job"), r.get("of")) == (job["name"], job["of"])]

    def belongs(self, digest: str) -> bool:
        """Whether the rows are from this state of the assay; a new file gets the digest as its first row."""
        if not self.rows:
            self.add({"digest": digest})
        return self.rows[0].get("digest") == digest


def run(selection: Selection, kept: KeptRows, workers: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Run the remaining jobs; yields (finished jobs, all jobs, the job) as jobs finish.

    One row of every fault comes first, so that an early end leaves a table of all faults. Then come hosts without a
    fault, clean runs and the rest of the faults, slow ones first. Raises Broken, with the messages of all broken jobs,
    when everything else is finished.
    """
    jobs = selection.jobs()
    left = sorted((job for job in jobs if not _finished(job, kept)), key=_priority)
    done = len(jobs) - len(left)
    begun = {job["name"]: job for job in left if job["kind"] == "fault" and not kept.of(job)}
    later = [job for job in left if job["name"] not in begun]
    rests: list[dict[str, Any]] = []
    children, broken = _Children(), dict[str, str]()
    with ThreadPoolExecutor(workers) as pool:
        futures: dict[Future, dict] = {}

        def begin(job: dict[str, Any]) -> None:
            futures[pool.submit(_job, job, kept, children)] = job

        for job in begun.values():
            begin({**job, "first": True})
        try:
            while futures or later or rests:
                while later and not begun:
                    begin(later.pop(0))
                while rests and not begun:
                    begin(rests.pop(0))
                ended, _ = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    job = futures.pop(future)
                    rest = begun.pop(job["name"]) if job.get("first") else None
                    try:
                        future.result()
                    except Broken as error:
                        broken[job["name"]] = str(error)
                    else:
                        if rest is not None:
                            rests.append(rest)
                            continue
                    done += 1
                    yield done, len(jobs), job
        finally:
            for future in futures:
                future.cancel()
            children.end()
    if broken:
        raise Broken("\n".join(broken.values()))


def _priority(job: dict[str, Any]) -> tuple[int, int, int]:
    """The place of a job in the queue: hosts, clean runs, faults.

    Within these, held-out hosts come first, then slow ones (operators of goldsmith and interpreted kernels).
    """
    host = None if job["kind"] == "clean" else catalogue.hosts()[job["host"]]
    long = host is not None and (bool(host.package) or job["backend"] == "triton")
    return ("twin", "clean", "fault").index(job["kind"]), -int(host is not None and host.held_out), -int(long)


def row_head(job: dict[str, Any]) -> dict[str, str]:
    """The first fields of each row of a job."""
    return {"job": job["name"], "of": job["of"]}


def _finished(job: dict[str, Any], kept: KeptRows) -> bool:
    """Whether all rows of a job are there: its last row, "end", has the number of seeds."""
    if job["kind"] == "clean":
        return {r["seed"] for r in kept.of(job) if "seed" in r} >= set(job["draws"])
    return any(r.get("end", 0) >= job["seeds"] for r in kept.of(job))


class _Children:
    """The running child processes, one per thread; an interrupt ends them all."""

    def __init__(self) -> None:
        self.running: set[_Child] = set()
        self.ended = False
        self.lock = threading.Lock()
        self.mine = threading.local()

    def get(self, device: str, *, new: bool) -> _Child:
        """The child of this thread, or a new one."""
        child = getattr(self.mine, "child", None)
        if child is not None and new:
            child.end()
        with self.lock:
            if self.ended:
                raise KeyboardInterrupt
            if child is None or child.over:
                child = self.mine.child = _Child(device)
                self.running.add(child)
        return child

    def end(self) -> None:
        with self.lock:
            self.ended = True
            for child in self.running:
                child.end()


def _job(job: dict[str, Any], kept: KeptRows, children: _Children) -> None:
    """Run one job to its end. Where a child dies, its current row is lost, and another child continues."""
    for _ in range(_RESTARTS):
        done = [[r["case"], r["seed"]] for r in kept.of(job) if "seed" in r]
        child = children.get(job["device"], new=job["alone"])
        ended = child.do({**job, "done": done}, kept)
        if not ended or job["alone"]:
            child.end()
        if children.ended:
            raise KeyboardInterrupt
        if ended:
            return
        kept.add({**row_head(job), **child.lost(job)})
    raise Broken(f"{job['name']}: the child process died {_RESTARTS} times")


def environment(device: str = "cpu") -> dict[str, str]:
    """The environment of a child process; on the CPU, Triton kernels are interpreted."""
    known = {name: v for name, v in os.environ.items() if name not in ("GOLDSMITH_LIBRARY", "TRITON_INTERPRET")}
    known |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GOLDSMITH_ISA": catalogue.native_library.LEVEL}
    return known | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


class _Child:
    """A process that runs one job after another."""

    def __init__(self, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environment(device),
        )  # fmt: skip
        self.stderr: deque[str] = deque(maxlen=60)
        self.at: dict | None = None
        self.last = time.monotonic()
        self.busy = self.over = self.timed_out = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def do(self, job: dict[str, Any], kept: KeptRows) -> bool:
        """Run the job and keep its rows; returns whether it finished."""
        self.at, self.last, self.busy = None, time.monotonic(), True
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            for line in self.process.stdout:
                row = json.loads(line)
                self.last = time.monotonic()
                if "begin" in row:
                    self.at = row["begin"]
                    continue
                kept.add({**row_head(job), **row})
                if "end" in row:
                    return True
        finally:
            self.busy = False
        return False

    def lost(self, job: dict[str, Any]) -> dict[str, Any]:
        """The row at which the process died; raises Broken where that says nothing about the kernel."""
        stderr, code = "".join(self.stderr), self.process.returncode
        if self.at is None or not (self.timed_out or code < 0):
            raise Broken(f"{job['name']}: {stderr[-1500:].strip() or 'the child process did not start'}")
        how = "took too long" if self.timed_out else f"ended with {code}"
        blank = {"verdict": "died", "stage": None, "causes": [], "raw": {}, "findings": [], "notes": [], "seconds": 0.0}
        return {**self.at, **blank, "died": f"the process {how}", "stderr": stderr[-600:]}

    def end(self) -> None:
        """End the process, where it still runs."""
        self.over = True
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.busy:
            self.process.kill()
        self.process.wait()
        if not self.busy:
            self.reader.join(1)
            self.process.stdout.close()
            self.process.stderr.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # the pipe was closed during the read
            for line in self.process.stderr:
                self.stderr.append(line)

    def _watch(self) -> None:
        """Kill the process when it has written nothing for ROW_LIMIT seconds."""
        while not self.over:
            time.sleep(1.0)
            if self.busy and time.monotonic() - self.last > ROW_LIMIT:
                self.timed_out = True
                self.process.kill()
                return


def everything(faults: list[Fault], host: str | None, backend: str | None) -> tuple[tuple[Host, str], ...]:
    """The (host, backend) pairs of these faults, to run without a fault too."""
    used = {(f.host.name, f.backend) for f in faults}
    chosen = [(h, b) for h in catalogue.hosts().values() for b in h.backends if (h.name, b) in used]
    return tuple((h, b) for h, b in chosen if host in (None, h.name) and backend in (None, b))
