"""Format, lint and types, as `make check` has them."""

import subprocess
import sys

import pytest

from repo.tree import ROOT


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_source_is_as_the_tool_wants_it(tool):
    pytest.importorskip(tool.split()[0], reason="comes with the extra dev")
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
