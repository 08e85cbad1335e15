"""Rows of `goldsmith bench`: every figure with the conditions that it was measured under."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ...core.device import machine
from .ceilings import Ceiling
from .timing import Timing

SCHEMA = 1


def load() -> float | None:
    """Processes that ran or wanted to, on average over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@dataclass(frozen=True)
class TimingRow:
    """One timing. `share_of_ceiling` is the floor, at the rates measured in the same run, over the median.

    The floor is the time of the bytes (at the copy rate, or the rate of reading) or that of the FLOPs, whichever is
    longer: `ceiling` is "copy", "read", or the instruction that gives most FLOPs ("fma", "dot_bf16", "amx_bf16").
    """

    op: str
    case: str
    sizes: dict[str, Any]
    dtype: str
    direction: str  # forward | backward
    # cold: L2 flushed before each call; graph: 20 calls in one CUDA graph, L2 warm; replayed: the same, each call with
    # inputs that L2 does not hold; wall: CPU
    mode: str
    peer: str
    backend: str
    median_us: float | None
    p10: float | None
    p90: float | None
    runs: int
    wall_us: float | None
    bytes: int | None
    floor_us: float | None
    share_of_ceiling: float | None
    copy_gb_s: float | None
    verified: bool | None
    verified_by: str
    error: float | None
    note: str
    machine: str
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    threads: int | None = None  # of a CPU
    flop: int | None = None
    ceiling: str = "copy"
    read_gb_s: float | None = None
    gflop_s: float | None = None  # of the ceiling's instruction
    load: float | None = field(default_factory=load)  # our own threads are in it
    schema: int = field(default=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        return {k: rounded(v) for k, v in asdict(self).items()}


def rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Conditions:
    """What every row of a run shares."""

    device: str
    machine: str
    versions: dict[str, str]
    commit: str
    date: str

    @classmethod
    def here(cls, device: str, commit_given: str = "") -> Conditions:
        facts = machine()
        gpu = facts.gpus[int(device.partition(":")[2] or 0)]["name"] if device.startswith("cuda") else None
        versions = {"goldsmith": __version__, "torch": facts.torch, "python": facts.python}
        if facts.triton:
            versions["triton"] = facts.triton
        for package in ("liger-kernel", "peer-pytorch", "product-key-memory", "transformers", "peft", "kt-kernel"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        name = gpu or f"{facts.cpu}, {facts.cores} cores"
        return cls(
            device.partition(":")[0], name, versions, commit_given or commit(), datetime.date.today().isoformat()
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        return f"{self.machine} | {versions} | {self.commit or 'no commit'} | {self.date}"


@functools.cache
def commit() -> str:
    """The commit that this package runs from, with + when files differ from it; nothing outside a checkout of ours."""
    root = Path(__file__).resolve().parents[4]
    if not (root / "src" / "goldsmith").is_dir() or not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        short = git("rev-parse", "--short", "HEAD")
        return short + ("+" if short and git("status", "--porcelain", "--untracked-files=no", "src") else "")
    except OSError:
        return ""  # no git here


def timed(
    timing: Timing, moved: int | None, ceiling: Ceiling, divide: int = 1, flop: int | None = None
) -> dict[str, Any]:
    """The figures of a row; `divide` calls in each timing."""
    median = timing.median / divide
    floor, what = ceiling.floor(moved, flop)
    return {
        "median_us": median,
        "p10": timing.p10 / divide,
        "p90": timing.p90 / divide,
        "runs": timing.runs,
        "wall_us": None if timing.wall is None else timing.wall / divide,
        "bytes": moved,
        "floor_us": floor,
        "share_of_ceiling": None if floor is None or not median else floor / median,
        "flop": flop,
        "ceiling": what,
    }


NOT_TIMED: dict[str, Any] = {
    "median_us": None, "p10": None, "p90": None, "runs": 0, "wall_us": None, "bytes": None, "floor_us": None,
    "share_of_ceiling": None, "flop": None, "ceiling": "",
}  # fmt: skip
