"""Whatever a candidate's process does, there is one verdict, and the next candidate is judged."""

import os
import time
from pathlib import Path

import pytest

from assay.gate.problems import RIGHT, candidate, problem
from goldsmith.assay import gate
from goldsmith.assay.gate.isolation.limits import resident_bytes
from goldsmith.assay.gate.isolation.zygote_process import zygote

LIMITS = gate.Limits(seconds=3, import_seconds=20, memory_bytes=1 << 30, output_bytes=1 << 16)
SWALLOWING = """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
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


def judged(one):
    return gate.judge(one, problem(), limits=LIMITS, probes="values")


def test_a_right_candidate_is_accepted():
    verdict = judged(gate.Candidate("right", RIGHT))
    assert (verdict.status, verdict.candidate, verdict.evidence) == ("accepted", "right", [])


@pytest.mark.parametrize(
    "status, text, body",
    [
        ("wrong", "exceeds its rounding bound", "return x.sigmoid() * w"),
        ("crashed", "ended with status 0 during a call", "import os; os._exit(0)"),
        ("crashed", "SIGSEGV) during a call, in candidate (kernel.py", "import ctypes; ctypes.string_at(0)"),
        ("crashed", "SIGABRT", "import os; os.abort()"),
        ("crashed", "raised KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("crashed", "ValueError: no (kernel.py:5)", "\nraise ValueError('no')"),
        ("crashed", "printed more than 65536 bytes", "while True: print('x' * 1000)"),
        ("timed_out", "a call had not ended after 3 s", "while True: pass"),
        ("timed_out", "a call had not ended", SWALLOWING),
        ("over_memory", "out of memory", "return torch.zeros(100 << 30, dtype=torch.uint8)"),
        ("crashed", "bytes that are no message", FLOODING),
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
        ("SystemExit", "raise SystemExit(0)"),
    ],
)
def test_a_source_without_a_candidate_is_refused(text, source):
    verdict = judged(gate.Candidate("source", source))
    assert verdict.status == "refused"
    assert text in " ".join(verdict.evidence)


def test_no_process_and_no_file_is_left():
    judged(candidate(FORKING))
    time.sleep(0.1)
    running = zygote()
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text()
    assert children.split() == [] and resident_bytes(running.process.pid) > 0
    assert not [n for n in os.listdir("/tmp") if n.startswith(f"home-{running.process.pid}-")]
