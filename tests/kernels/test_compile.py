"""Every kernel compiles for a card in each specialised form that its operator's cases ask for, without a card here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def compiled(level, which, cache):
    """The rows of compile_offline.py, in a process of its own: Triton reads TRITON_INTERPRET once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_offline.py"), level, which],
        env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    *rows, last = map(json.loads, done.stdout.splitlines())
    broken = [f"{row['kernel']}, {row['where']}: {row['error']}" for row in rows if "error" in row]
    assert not broken, "\n\n".join(broken)
    return rows, last["not_launched"]


def test_kernels_compile_at_sizes_of_one_and_usual_ones(tmp_path):
    rows, not_launched = compiled("ttir", "few", tmp_path)
    assert not not_launched
    assert len(rows) > 100


@pytest.mark.slow
@pytest.mark.parametrize("which", ["small", "large"])
def test_kernels_compile_for_every_case(which, tmp_path):
    compiled("ttir", which, tmp_path)


@pytest.mark.slow
def test_kernels_of_large_cases_fit_the_card(tmp_path):
    rows, _ = compiled("cubin", "large", tmp_path)
    for row in rows:
        assert row["shared"] <= 227 * 1024, row  # what a program may have on an H100
