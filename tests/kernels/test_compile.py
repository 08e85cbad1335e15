"""Every kernel compiles for a card in each specialised form that its operator's cases ask for, without a card here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def rows_of(script, cache, *arguments):
    """What a script of this folder prints, in a process of its own: Triton reads TRITON_INTERPRET once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled(level, which, cache):
    *rows, last = rows_of("compile_offline.py", cache, level, which)
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


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_numbers_of_shuffled_lists_lie_in_their_lanes(which, tmp_path):
    first, *rows = rows_of("lanes_offline.py", tmp_path, which)
    assert first == {"name": "misplaced", "traps": 1}  # so a layout with which shuffles would answer wrongly stops
    assert rows and not any(row["traps"] for row in rows), rows
