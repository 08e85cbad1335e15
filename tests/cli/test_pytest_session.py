"""A session whose process a kernel ends fails, whatever the status of that process."""

import importlib.metadata
import subprocess
import sys

import pytest

INSTALLED = any(e.name == "goldsmith" for e in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "goldsmith.pytest_plugin"]
TESTS = """
import os

def test_before():
    pass

def test_ends_the_process():
    {0}

def test_after():
    pass
"""


def session(tmp_path, body, *arguments):
    (tmp_path / "test_kernels.py").write_text(TESTS.format(body))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN]
    return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.parametrize(
    "body, status", [("os._exit(0)", 1), ("os._exit(3)", 3), ("import ctypes; ctypes.CDLL(None)._exit(0)", 1)]
)
def test_a_session_that_ends_early_fails_and_names_the_test(tmp_path, body, status):
    done = session(tmp_path, body)
    assert done.returncode == status
    assert "during test_kernels.py::test_ends_the_process, when 1 of 3 tests had reported" in done.stderr


@pytest.mark.parametrize("body, status", [("pass", 0), ("assert False", 1), ("import pytest; pytest.skip()", 0)])
def test_other_sessions_end_as_they_do_without_a_child(tmp_path, body, status):
    done = session(tmp_path, body)
    assert done.returncode == status and "goldsmith" not in done.stderr
    assert session(tmp_path, body, "-k", "nothing").returncode == 5
