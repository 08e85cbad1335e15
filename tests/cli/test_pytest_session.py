"""A session whose process a kernel ends fails, whatever the status of that process, and the tests after it run."""

import importlib.metadata
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

INSTALLED = any(e.name == "goldsmith" for e in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "goldsmith.pytest_plugin"]
TESTS = """
import os
import pytest

def test_before(record_property):
    record_property("size", 3)

def test_skipped():
    pytest.skip("not here")

def test_ends_the_process():
    print("about to end")
    {0}

def test_after():
    pass
"""


def session(tmp_path, body, *arguments, tests=TESTS):
    (tmp_path / "test_kernels.py").write_text(tests.format(body))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN]
    return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "body, status", [("os._exit(0)", 0), ("os._exit(3)", 3), ("import ctypes; ctypes.CDLL(None)._exit(0)", 0)]
)
def test_a_test_that_ends_the_process_has_failed_and_the_session_goes_on(tmp_path, body, status):
    done = session(tmp_path, body, "--junitxml", "results.xml")
    assert done.returncode == 1
    assert f"ended with status {status} during test_kernels.py::test_ends_the_process, when 2 of 4" in done.stderr
    assert "1 failed, 2 passed, 1 skipped" in done.stdout and "about to end" in done.stdout
    cases = ElementTree.parse(tmp_path / "results.xml").getroot().iter("testcase")
    kinds = {case.get("name"): [child.tag for child in case] for case in cases}
    assert kinds["test_before"] == ["properties"] and kinds["test_after"] == []
    assert kinds["test_ends_the_process"] == ["failure"] and kinds["test_skipped"] == ["skipped"]


def test_a_session_goes_on_after_each_test_that_ends_it_but_not_after_an_import_or_a_signal_to_the_parent(tmp_path):
    every = "import os, signal\ndef test_a(): os._exit(0)\ndef test_b(): os.abort()\ndef test_c(): {}\n"
    done = session(tmp_path, "pass", tests=every)
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout and done.stderr.count("goes on") == 2
    done = session(tmp_path, "", tests="import os\nos._exit(0)\n")
    assert done.returncode == 1 and "goes on" not in done.stderr
    stopped = "import os, signal, time\ndef test_a(): os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)\n"
    done = session(tmp_path, "", tests=stopped)
    assert done.returncode == 128 + 15 and "goes on" not in done.stderr


@pytest.mark.parametrize("body, status", [("pass", 0), ("assert False", 1), ("pytest.skip()", 0)])
def test_other_sessions_end_as_they_do_without_a_child(tmp_path, body, status):
    done = session(tmp_path, body)
    assert done.returncode == status and "goldsmith" not in done.stderr
    assert session(tmp_path, body, "-k", "nothing").returncode == 5


LOOPS = """
import ctypes

def test_loops(assay):
    import torch

    def golden(x):
        return x * 2

    def looping(x):
        ctypes.PyDLL(None).sleep(600)  # with the lock of the interpreter, so that no thread of Python runs

    assay.check(assay.Target(looping, golden, cases={{"x": torch.ones(3)}}))

def test_after():
    pass
"""


def test_a_run_of_a_candidate_that_does_not_end_fails_its_test_alone(tmp_path):
    done = session(tmp_path, "", "--assay-seconds", "1", tests=LOOPS)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout
    assert "was ended: run 'values' of probe values (case given) took 1 s" in done.stdout
