"""Format, lint and types, as `make check` has them."""

import subprocess
import sys
from pathlib import Path

import pytest

from repo.tree import ROOT


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_source_passes_the_formatter_and_the_linter(tool):
    pytest.importorskip(tool.split()[0], reason="comes with the extra dev")
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_native_library_passes_clang_format():
    pytest.importorskip("clang_format", reason="comes with the extra dev")
    sources = [str(path) for end in ("cpp", "h") for path in sorted((ROOT / "csrc").rglob(f"*.{end}"))]
    tool = Path(sys.executable).with_name("clang-format")
    done = subprocess.run([tool, "--dry-run", "--Werror", *sources], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
