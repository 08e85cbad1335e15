"""Candidates of the user's own: loaded in a process of their own, and targets whose calls that process makes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch

from ...assay.declare.target import Target
from ...assay.gate.isolation.candidate_process import CandidateProcess
from ...assay.gate.isolation.candidate_side import Parts
from ...assay.gate.isolation.limits import Limits
from ...assay.gate.isolation.sandbox import Surroundings
from ...assay.gate.isolation.zygote_process import zygote
from ...assay.report.check_report import Report
from ...assay.report.results import CERTAIN, FAIL, Finding
from ..user_targets import load_targets, one_target

LIMIT = 120.0  # seconds for one call
_FILES, _PROCESSES, _OUTPUT = 4096, 4096, 64 << 20
_SHARE = 0.8  # of the memory that is free at the start


def load(name: str, index: int | None) -> Parts:
    """The candidate of a target. Its file may hold the golden as well, which this process then has, and never calls."""
    target = one_target(name) if index is None else load_targets(name)[index]
    return Parts(target.candidate, target.backward if callable(target.backward) else None, target.reset)


def in_its_own_process(target: Target, name: str, index: int | None, device: str, limit: float | None) -> Target:
    """The target, whose candidate runs in a process of its own; if that ends, the next call starts another.

    It may use files and network, since it is this user's own code: there are limits and no namespaces.
    """
    seconds = LIMIT if limit is None else limit
    runner = CandidateProcess(
        zygote(),
        Limits(seconds, seconds, _free_memory(), _FILES, _PROCESSES, _OUTPUT),
        f"{__name__}:load",
        {"name": name, "index": index},
        Surroundings(
            boxed=False,
            gpu=str(device) if torch.device(device).type == "cuda" else "",
            threads=torch.get_num_threads(),
            paths=tuple(sys.path),
        ),
        again=True,
    )
    return replace(target, runner=runner)


def add_replaced(report: Report, target: Target) -> None:
    """Adds a finding for each function of torch, Python or the assay that the candidate replaced in its process."""
    seen = target.runner.seen if isinstance(target.runner, CandidateProcess) else []
    for name in dict.fromkeys(str(e[1]) for e in seen if e[0] == "patched"):
        text = f"the candidate replaced {name}, which everything else in its process uses, too"
        case = report.cases[0] if report.cases else ""
        finding = Finding(CERTAIN, "values", name, None, None, None, text, case, "patched_runtime")
        report.findings.append(finding)
        report.verdict = FAIL


def _free_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1 << 30, int(free * _SHARE))
