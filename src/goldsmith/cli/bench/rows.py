"""TimingRow: a row of `goldsmith bench`, with a timing and the conditions of its measurement."""

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
    """The load average of the last minute; None if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@dataclass(frozen=True)
class TimingRow:
    """One timing.

    floor_us           the time for the bytes or for the FLOPs, whichever is longer, at rates measured in the same run
    ceiling            what sets the floor: "copy", "read", or an instruction ("fma", "dot_bf16", "amx_bf16")
    share_of_ceiling   floor_us over the median
    mode               cold: on a GPU, L2 flushed before each call; wall: on a CPU; graph: 20 calls in one CUDA graph,
                       L2 warm; replayed: like graph, but with inputs that L2 does not hold
    """

    op: str
    case: str
    sizes: dict[str, object]
    dtype: str
    direction: str  # forward | backward
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
    threads: int | None = None  # on a CPU
    flop: int | None = None
    ceiling: str = "copy"
    read_gb_s: float | None = None
    gflop_s: float | None = None  # the rate of the instruction in `ceiling`
    load: float | None = field(default_factory=load)  # includes our own threads
    schema: int = field(default=SCHEMA)

    def to_json(self) -> dict[str, object]:
        return {k: rounded(v) for k, v in asdict(self).items()}


def rounded(value: object) -> object:
    """A float to five digits; anything else as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Conditions:
    """Facts that all rows of a run share."""

    device: str
    machine: str
    versions: dict[str, str]
    commit: str
    date: str

    @classmethod
    def here(cls, device: str, given_commit: str = "") -> Conditions:
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
            device.partition(":")[0], name, versions, given_commit or commit(), datetime.date.today().isoformat()
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        return f"{self.machine} | {versions} | {self.commit or 'no commit'} | {self.date}"


@functools.cache
def commit() -> str:
    """The commit that this package runs from, with + if files differ from it; "" outside a checkout of goldsmith."""
    root = Path(__file__).resolve().parents[4]
    if not (root / "src" / "goldsmith").is_dir() or not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        return process.stdout.strip() if process.returncode == 0 else ""

    try:
        short_hash = git("rev-parse", "--short", "HEAD")
        return short_hash + ("+" if short_hash and git("status", "--porcelain", "--untracked-files=no", "src") else "")
    except OSError:
        return ""  # git is not installed


Figures = dict[str, Any]  # fields of a TimingRow, by name


def timed(
    timing: Timing, bytes_moved: int | None, ceiling: Ceiling, divide: int = 1, flop: int | None = None
) -> Figures:
    """The figures of a row whose timing spans `divide` calls."""
    median = timing.median / divide
    floor, name = ceiling.floor(bytes_moved, flop)
    return {
        "median_us": median,
        "p10": timing.p10 / divide,
        "p90": timing.p90 / divide,
        "runs": timing.runs,
        "wall_us": None if timing.wall is None else timing.wall / divide,
        "bytes": bytes_moved,
        "floor_us": floor,
        "share_of_ceiling": None if floor is None or not median else floor / median,
        "flop": flop,
        "ceiling": name,
    }


NOT_TIMED: Figures = {
    "median_us": None, "p10": None, "p90": None, "runs": 0, "wall_us": None, "bytes": None, "floor_us": None,
    "share_of_ceiling": None, "flop": None, "ceiling": "",
}  # fmt: skip
