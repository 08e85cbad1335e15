"""Builds of the native library with sanitizers, and runs of Python scripts on them in separate processes."""

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from repo.tree import ROOT, SOURCE

CASES = Path(__file__).with_name("cases")
# Libraries to load before Python; AddressSanitizer looks up the C++ library's functions when it starts.
PRELOADED = {"address": ("libasan.so", "libstdc++.so.6"), "thread": ("libtsan.so",)}
TOGETHER = ("lane", "levels", "measure", "pool", "pool:overrun", "pool:race")
SECONDS = 300  # time limit of a script
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python itself has many leaks
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "die_after_fork=0",
}


@cache
def library(variant: str = "release") -> Path:
    """The library of this checkout, built if it is missing or older than its sources."""
    command = [sys.executable, ROOT / "scripts/native.py", variant]
    done = subprocess.run(command, capture_output=True, text=True)
    if "is missing" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def run(variant: str, case: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run cases/<case>.py on a sanitized library; skips if the compiler or the system lacks the sanitizer."""
    name = ":".join([case, *arguments])
    if name in TOGETHER:
        return _together(variant)[name]
    return _sanitized(variant, str(CASES / f"{case}.py"), *arguments)


@cache
def _together(variant: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the scripts whose time is mostly imports in forks of one process."""
    with tempfile.TemporaryDirectory() as place:
        done = _sanitized(variant, str(CASES.with_name("forked.py")), place, *TOGETHER)
        assert done.returncode == 0, done.stderr
        left = {path.name: path.read_text() for path in Path(place).iterdir()}
    return {
        name: subprocess.CompletedProcess(name, int(left[f"{name}.status"]), left[f"{name}.out"], left[f"{name}.err"])
        for name in TOGETHER
    }


def _sanitized(variant: str, *command: str) -> subprocess.CompletedProcess[str]:
    preloaded = [_shared(name) for name in PRELOADED[variant]]
    environment = (
        os.environ
        | OPTIONS
        | {
            "LD_PRELOAD": " ".join(preloaded),
            "GOLDSMITH_LIBRARY": str(library(variant)),
            "PYTHONPATH": str(SOURCE.parent),
            "OMP_NUM_THREADS": "1",
        }
    )
    command = (sys.executable, *command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if "unexpected memory mapping" in done.stderr:  # gcc 12's ThreadSanitizer fails if addresses are too random
        done = subprocess.run(["setarch", "-R", *command], env=environment, capture_output=True, text=True)
        if "unexpected memory mapping" in done.stderr or "setarch" in done.stderr:
            pytest.skip("ThreadSanitizer cannot run with this system's address randomisation")
    return done


def _shared(name: str) -> str:
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"this compiler has no {name}")
    return path
