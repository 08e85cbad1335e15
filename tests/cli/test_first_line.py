"""The commands that import torch and transformers say so first: a user sees a line within a second."""

import subprocess
import sys

import pytest

import goldsmith

SOURCE = goldsmith.__path__[0] + "/.."
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from goldsmith.cli import app; app()"


@pytest.mark.parametrize("command", [["generate", "a/model", "--prompt", "x"], ["finetune", "a/model", "--data", "x"]])
def test_the_first_line_comes_before_any_heavy_import(command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, cwd=SOURCE, timeout=120
    )
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "Loading torch and transformers, then model"


def test_a_closed_stderr_is_no_error():
    code = "import sys; sys.stderr = None; from goldsmith.cli.terminal import announce; announce('Loading')"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, timeout=120).returncode == 0
