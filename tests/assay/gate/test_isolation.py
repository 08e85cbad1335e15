"""Whatever a candidate's process does, there is one verdict, and the next candidate is judged."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from assay.gate.problems import RIGHT, candidate, problem, rows
from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate.isolation import candidate_process
from goldsmith.assay.gate.isolation.limits import resident_bytes
from goldsmith.assay.gate.isolation.sandbox import FULL, linked_folders
from goldsmith.assay.gate.isolation.zygote_process import zygote
from goldsmith.assay.gate.tricks import late_writes
from goldsmith.core.tracing import TargetError

LIMITS = gate.Limits(seconds=4, import_seconds=20, memory_bytes=1 << 30, output_bytes=1 << 16)
SWALLOWING = """
import time
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
# LLVM in Triton's compiler takes these signals
AFTER_COMPILING = """
import signal
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
import time
while True:
    time.sleep(600)
"""
FLOODING = """
import os
for number in range(3, 30):
    try:
        os.write(number, b"x" * 99)
    except OSError:
        pass
"""
FORKING = """
import os, time
open("left", "w").write("x")
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
return x * w
"""


SLOW = """
import time
if not torch._C._len_torch_dispatch_stack():
    time.sleep(0.2)
return torch.softmax(x, -1) * w
"""
HIDDEN = f"""
import os
assert not any(map(os.path.exists, ("/run", "/var", {__file__!r}, {os.path.expanduser("~/.ssh")!r})))
return torch.softmax(x, -1) * w
"""
CACHES = """
import os
assert {os.environ[name] for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME")} == {os.getcwd()}
return torch.softmax(x, -1) * w
"""
STORED = """
import os, time
for place in (os.open("here", os.O_CREAT | os.O_RDWR), os.memfd_create("nowhere")):
    os.posix_fallocate(place, 0, 150 << 20)
time.sleep(1)
return torch.softmax(x, -1) * w
"""


def judged(one, limits=LIMITS):
    return gate.judge(one, problem(), limits=limits, probes="values")


def test_a_right_candidate_is_accepted():
    verdict = judged(gate.Candidate("right", RIGHT))
    assert (verdict.status, verdict.candidate, verdict.evidence) == ("accepted", "right", [])


@pytest.mark.parametrize(
    "status, text, body",
    [
        ("wrong", "exceeds its rounding bound", "return x.sigmoid() * w"),
        ("crashed", "ended with status 0 during a call", "import os; os._exit(0)"),
        ("crashed", "SIGSEGV) during a call, in candidate (candidate_source.py", "import ctypes; ctypes.string_at(0)"),
        ("crashed", "SIGABRT", "import os; os.abort()"),
        ("crashed", "program: in candidate (candidate_source.py, line 5)", "raise KeyboardInterrupt"),
        ("crashed", "it raised E, which would have ended the program: in", "raise type('E', (BaseException,), {})"),
        ("crashed", "what it returned cannot be read: RuntimeError", "return torch._efficientzerotensor(x.shape)"),
        ("crashed", "ValueError: no (candidate_source.py:5)", "\nraise ValueError('no')"),
        ("crashed", "printed more than 65536 bytes", "while True: print('x' * 1000)"),
        ("timed_out", "a call had not ended after 4 s", "while True: pass"),
        ("timed_out", "a call had not ended after 4 s, in candidate (candidate_source.py, line ", AFTER_COMPILING),
        ("timed_out", "a call had not ended", SWALLOWING),
        ("over_memory", "needed (candidate_source.py:5); it may use 1024 MiB", "return torch.zeros(100 << 30)"),
        ("crashed", "bytes that are no message", FLOODING),
        ("crashed", "as code does that writes to a file descriptor which it did not open", FLOODING),
    ],
)  # fmt: skip
def test_misbehaviour_is_one_verdict(status, text, body):
    verdict = judged(candidate(body))
    assert verdict.status == status
    assert text in " ".join(verdict.evidence)


@pytest.mark.parametrize(
    "text, source",
    [
        ("SyntaxError", "def candidate("),
        ("No module named 'nowhere_to_be_found'", "import nowhere_to_be_found"),
        ("it defines no candidate and no ModelNew", "x = 1"),
        ("candidate is of type int", "candidate = 1"),
        ("takes 'missing', which is not supplied", "def candidate(missing): return missing"),
        ("importing it raised SystemExit: 0 (candidate_source.py:1)", "raise SystemExit(0)"),
    ],
)
def test_a_source_without_a_candidate_is_refused(text, source):
    verdict = judged(gate.Candidate("source", source))
    assert verdict.status == "refused"
    assert text in " ".join(verdict.evidence)


def test_the_limit_holds_for_a_call_and_another_for_all_of_them():
    limits = gate.Limits(seconds=3)
    assert gate.judge(candidate(SLOW), problem(backward=None), limits=limits, probes="quick").ok
    verdict = gate.judge(candidate(SLOW), problem(), limits=replace(limits, total_seconds=0.4), probes="quick")
    assert (verdict.status, verdict.evidence[0].partition(", ")[0]) == (
        "timed_out", "its imports and calls had taken 0.4 s together",
    )  # fmt: skip


def test_a_program_whose_torch_has_several_threads_gets_a_verdict():
    """The zygote had used its pool of threads; a fork has none of them, and waited for them for ever."""
    program = "from assay.gate.test_isolation import RIGHT, gate, problem\n"
    program += "verdict = gate.judge(gate.Candidate('right', RIGHT), problem(), probes='values')\nprint(verdict.status)"
    tests = Path(__file__).parents[2]
    several = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    environment = os.environ | several | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout == "accepted\n", done.stderr


def test_caches_of_compilers_are_the_candidates_own():
    assert judged(candidate(CACHES)).ok


def test_temporary_folders_are_memory_and_files_of_the_user_are_not_there():
    if zygote().isolation != FULL:
        pytest.skip("no namespaces here")
    limits = replace(LIMITS, memory_bytes=256 << 20)
    assert judged(candidate(HIDDEN), limits).ok
    assert judged(candidate(STORED), limits).status == "over_memory"


def test_no_process_and_no_file_is_left():
    judged(candidate(FORKING))
    time.sleep(0.1)
    running = zygote()
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text()
    assert children.split() == [] and resident_bytes(running.process.pid) > 0
    assert not [n for n in os.listdir("/tmp") if n.startswith(f"home-{running.process.pid}-")]


def test_folders_that_files_of_packages_are_links_to_are_shown(tmp_path):
    site, store, own = tmp_path / "site-packages", tmp_path / "store" / "0a1b", tmp_path / "src" / "own"
    for file in (store / "kernels/__init__.py", store / "kernels-1.0.dist-info/RECORD", own / "__init__.py"):
        file.parent.mkdir(parents=True)
        file.touch()
    for folder in ("kernels", "nvidia/kernels", "plain"):
        (site / folder).mkdir(parents=True)
    (site / "kernels/__init__.py").symlink_to(store / "kernels/__init__.py")
    (site / "nvidia/kernels/__init__.py").symlink_to(own / "__init__.py")
    (site / "plain/__init__.py").touch()
    assert linked_folders((str(site), str(own))) == (str(store), str(own))


def test_many_such_folders_are_shown_as_one(tmp_path):
    site = tmp_path / "site-packages"
    site.mkdir()
    for number in range(9):
        package = tmp_path / f"store/{number}/package{number}"
        package.mkdir(parents=True)
        (tmp_path / f"store/{number}/package{number}.dist-info").mkdir()
        (site / package.name).symlink_to(package)
    assert linked_folders((str(site),)) == (str(tmp_path / "store"),)


EARLY = """
import os, subprocess
from goldsmith.assay.gate.isolation.zygote import ForkedProcess, Zygote
zygote = Zygote.__new__(Zygote)
child = subprocess.Popen(["sleep", "100"])
zygote.children = {child.pid: ForkedProcess(None, "", None, 0.0)}
print(os.WTERMSIG(zygote._end(child.pid)))
"""


def test_a_process_that_has_made_no_group_yet_is_ended():
    """Its group is what is killed; a zygote that waited for it waited for ever."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "9\n"


def test_memory_is_looked_at_once_more_before_the_verdict(monkeypatch):
    """As where a thread takes it just before the last reply."""
    known = late_writes.evidence

    def evidence(process):
        monkeypatch.setattr(candidate_process, "resident_bytes", lambda *_: 0)
        process.answer({"do": "late"}, "a last look", lambda reply: reply)
        monkeypatch.setattr(candidate_process, "resident_bytes", lambda *_: 2 << 30)
        process.watched_at = float("inf")  # the reply comes before the next look
        return known(process)

    monkeypatch.setattr(late_writes, "evidence", evidence)
    verdict = judged(candidate("return torch.softmax(x, -1) * w"))
    assert (verdict.status, "it may use 1024" in verdict.evidence[0]) == ("over_memory", True)


def test_a_candidate_without_parameters_is_told_so():
    verdict = judged(gate.Candidate("none", "def candidate():\n    return 1.0\n"))
    assert verdict.status == "wrong" and verdict.evidence[0] == "it has no parameters; the golden has x, w"
    assert "the candidate's [] (one number)" in verdict.evidence[1]


@pytest.mark.parametrize("more", [{"memory_bytes": 2.5e9}, {"memory_bytes": 1 << 70}, {"files": 10.5}])
def test_limits_that_the_system_cannot_hold_are_wrong_arguments(more):
    """Not a candidate that crashed."""
    with pytest.raises(ValueError, match=f"{next(iter(more))}: expected a whole number of at most"):
        gate.Limits(**more)


def test_a_golden_or_a_case_that_exits_is_a_fault_of_the_problem():
    def leaves(x, w):
        sys.exit(3)

    verdict = gate.judge(gate.Candidate("right", RIGHT), gate.Problem(leaves, rows))
    assert (verdict.status, verdict.reason) == ("refused", "reference_fault")
    assert "it raised SystemExit(3)" in verdict.evidence[0]
    with pytest.raises(TargetError, match="could not be drawn: SystemExit: 4"):
        gate.Problem(leaves, assay.case(T=[3])(lambda make, T: sys.exit(4)))
