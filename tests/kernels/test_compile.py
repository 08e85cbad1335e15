"""Every kernel compiles for an H100 in each specialised form that its operator's cases need; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.sweep(2)


def rows_of(script, cache, *arguments):
    """The rows that a script of this folder prints, in its own process: Triton reads TRITON_INTERPRET only once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode in (0, 1) and not process.stderr, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def compiled(level, which, cache):
    *rows, last = rows_of("compile_offline.py", cache, level, which)
    broken = [f"{row['kernel']}, {row['where']}: {row['error']}" for row in rows if "error" in row]
    assert not broken, "\n\n".join(broken)
    assert not last["confused"], "launched with the compiled kernel of another launch"
    return rows, last["not_launched"]


def test_kernels_compile_at_sizes_of_one_and_at_usual_sizes(tmp_path):
    rows, not_launched = compiled("ttir", "few", tmp_path)
    assert not not_launched
    assert len(rows) > 100
    # both kernels must add in the same order, and Triton adds two numbers alike in every layout, but not eight
    alike = ("_project_kernel", "_chunks_kernel")
    assert {(row["kernel"], *row["addends"]) for row in rows if row["kernel"] in alike} == {(name, 2) for name in alike}


def test_sums_that_all_lanes_read_are_one_number(tmp_path):
    """With equal streams a Sinkhorn's gradient is the difference of equal numbers, and 0 only if each lane has them."""
    rows = rows_of("compile_offline.py", tmp_path, "sums", "few", "mhc.sinkhorn", "mhc.coefficients")[:-1]
    assert len({row["kernel"] for row in rows}) == 4 and not any(row["contracted"] for row in rows), rows


@pytest.mark.slow
@pytest.mark.parametrize("which", ["small", "large"])
def test_kernels_compile_for_every_case(which, tmp_path):
    compiled("ttir", which, tmp_path)


@pytest.mark.slow
def test_kernels_of_large_cases_fit_the_limits_of_an_h100(tmp_path):
    rows, _ = compiled("cubin", "large", tmp_path)
    for row in rows:
        assert row["shared"] <= 227 * 1024, row  # the limit per program on an H100


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_elements_of_shuffled_lists_are_in_their_lanes(which, tmp_path):
    first, *rows = rows_of("lanes_offline.py", tmp_path, which)
    assert first == {"name": "misplaced", "traps": 1}  # so a layout that makes shuffles wrong would trap
    assert rows and not any(row["traps"] for row in rows), rows
