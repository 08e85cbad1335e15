"""Spares: processes that are started and warmed up before their candidate is there."""

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.gate.problems import RIGHT, candidate, problem
from goldsmith.assay import gate
from goldsmith.assay.gate.candidate import LOADER
from goldsmith.assay.gate.formats.problem_source import ProblemSource
from goldsmith.assay.gate.isolation import zygote_process
from goldsmith.assay.gate.isolation.candidate_process import CandidateProcess
from goldsmith.assay.gate.isolation.limits import Limits, children, resident_bytes
from goldsmith.assay.gate.isolation.sandbox import FULL, Surroundings
from goldsmith.assay.gate.isolation.zygote_process import zygote
from goldsmith.assay.gate.judges import Judges
from goldsmith.assay.gate.judging import GateOptions, judge_all

LIMITS = Limits(seconds=20, memory_bytes=1 << 30)
OPTIONS = GateOptions(limits=LIMITS, probes="quick", seed=1)
PATCHED = "torch.nn.functional.relu = torch.tanh\nreturn torch.softmax(x, -1) * w"
ALONE = """
import os
home = os.getcwd()
assert os.listdir(os.path.dirname(home)) == [os.path.basename(home)]
assert len([name for name in os.listdir("/proc") if name.isdecimal()]) == 2
"""
IN_A_CONTEXT = """
import torch
assert torch.cuda.is_initialized() and torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == 0
"""
# what a candidate finds when it is imported: its limits, random numbers, settings, loaded modules of the judge, files
FACTS = """
import os, resource, sys, torch
limits = [resource.getrlimit(n) for n in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
numbers = torch.rand(()).item(), torch.initial_seed(), torch.get_num_threads(), torch.is_grad_enabled()
raise ValueError((limits, numbers, len(os.listdir("/proc/self/fd")), sorted(os.environ), os.listdir()))
"""
SAME = {
    "right": gate.Candidate("right", RIGHT),
    "wrong": candidate("return torch.softmax(x, -1)"),
    "patched": candidate(PATCHED),
    "left": candidate("torch.set_num_threads(3)\nreturn torch.softmax(x, -1) * w"),
    "facts": gate.Candidate("facts", FACTS),
    "memory": candidate("return torch.zeros(100 << 30)"),
    "printed": candidate("while True: print('x' * 1000)"),
    "kept": candidate("return kept.setdefault('y', torch.softmax(x, -1) * w)", head="kept = {}"),
}


@pytest.fixture
def spares(monkeypatch):
    """This process's zygote, which makes spares."""
    own = zygote()
    monkeypatch.setattr(own, "spares", True)
    yield own
    own.end_spare()


@contextlib.contextmanager
def loaded(own, limits=LIMITS, head="", **around):
    """The process of a candidate that begins with these lines; only started where it needs a GPU that is missing."""
    arguments = gate.Candidate("right", head + RIGHT).loading(problem().construct)
    process = CandidateProcess(own, limits, LOADER, arguments, Surroundings(**around), ahead=True)
    try:
        process._start() if around.get("gpu") and not torch.cuda.is_available() else process.load()
        yield process
    finally:
        process.close()


def judged(one, **options):
    (verdict,) = judge_all([one], problem(backward=None), options=replace(OPTIONS, **options))
    return verdict.status, verdict.reason, verdict.evidence


def test_the_next_candidate_gets_the_spare_and_another_one_is_made(spares):
    with loaded(spares) as first:
        spare = spares.spare
        assert spare.pid != first.pid
    with loaded(spares, replace(LIMITS, seconds=3, output_bytes=99)) as second:  # which only the judge has to know
        assert second.pid == spare.pid and spares.spare.pid != spare.pid
        taken = resident_bytes(second._candidate_pid()) - second.resident
        assert abs(taken) < 8 << 20  # what it has loaded before is not the candidate's memory


@pytest.mark.parametrize(
    "limits, around",
    [
        ({"memory_bytes": 2 << 30}, {}), ({"files": 99}, {}), ({"processes": 9}, {}), ({}, {"hidden": ("/opt",)}),
        ({}, {"threads": 1}), ({}, {"paths": ("/opt",)}), ({}, {"boxed": False}), ({}, {"gpu": "cuda"}),
        ({}, {"triton": True}), ({}, {}),
    ],
)  # fmt: skip
def test_another_setting_makes_another_process(spares, monkeypatch, tmp_path, limits, around):
    monkeypatch.setattr(spares, "before", "")
    monkeypatch.chdir(tmp_path)  # a process without a sandbox writes there
    with loaded(spares):
        spare = spares.spare
    if not limits and not around:
        monkeypatch.chdir(tmp_path.parent)
    with loaded(spares, replace(LIMITS, **limits), **around) as second:
        assert second.pid != spare.pid and not Path(f"/proc/{spare.pid}").exists()


def test_what_triton_needs_is_made_ready_for_all_later_candidates(spares, monkeypatch):
    monkeypatch.setattr(spares, "before", "")
    with loaded(spares, triton=True):
        spare = spares.spare
    with loaded(spares) as second:
        assert second.pid == spare.pid


def kill(spare):
    inner = [spare.pid]  # in a sandbox, its child's child, which ends a little later
    while children(inner[-1]):
        inner += children(inner[-1])
    os.kill(spare.pid, signal.SIGKILL)
    while len(inner) > 1 and Path(f"/proc/{inner[-1]}").exists():
        time.sleep(0.01)


def stop(spare):
    os.killpg(spare.pid, signal.SIGSTOP)


def write(spare):
    Path(spare.home, "left").touch()


@pytest.mark.parametrize("harm", [kill, stop, write])
def test_a_spare_that_somebody_has_harmed_is_replaced(spares, monkeypatch, harm):
    with loaded(spares):
        spare = spares.spare
    harm(spare)
    if harm is stop:
        monkeypatch.setattr(zygote_process, "_PATIENCE", 0.5)
    with loaded(spares) as second:
        assert second.pid != spare.pid and not Path(f"/proc/{spare.pid}").exists() and not Path(spare.home).exists()
        third = spares.spare
    monkeypatch.undo()
    spares.spares = True
    with loaded(spares) as process:
        assert process.pid == third.pid


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SAME)
def test_a_verdict_is_the_same_in_a_spare(spares, name):
    spares.spares = False
    plain = judged(SAME[name])
    spares.spares = True
    with loaded(spares):
        spare = spares.spare
    assert spare is not None
    found = judged(SAME[name])
    assert spares.spare is not spare and found == plain
    assert name != "facts" or "ValueError" in plain[2][0]


def test_a_candidate_sees_nothing_of_the_spare(spares):
    if spares.isolation != FULL:
        pytest.skip("no namespaces here")
    with loaded(spares):
        spare = spares.spare
    with loaded(spares, head=ALONE) as process:
        assert process.pid == spare.pid and Path(spares.spare.home).exists()


def test_nothing_warms_up_while_calls_are_timed(spares):
    assert judged(gate.Candidate("right", RIGHT), time=True)[0] == "accepted"
    assert spares.spare is None


@pytest.mark.parametrize("killed", [True, False])
def test_no_spare_is_left_when_its_judge_has_ended(tmp_path, killed):
    file = tmp_path / "softmax.py"
    cases = '@assay.case(T=[2])\ndef cases(make, T):\n    return {"x": make.normal(T, 3), "w": make.normal(3)}\n'
    golden = "def golden(x, w):\n    return torch.softmax(x, -1) * w\n"
    file.write_text(f"import torch\nfrom goldsmith import assay\n\n{golden}\n\n{cases}\n\nbackward = None\n")
    assert not Judges(1, OPTIONS).spares  # on a CPU only where they are asked for
    with Judges(1, OPTIONS, spares=True) as judges:
        (verdict,) = judges.in_order([(ProblemSource(str(file)), gate.Candidate("right", RIGHT))])
        above, judge = judges.zygote.process.pid, judges.processes[0].pid
        (own,) = set(children(above)) - {judge}
        (spare,) = children(own)
        (home,) = Path(tempfile.gettempdir()).glob(f"home-{own}-*")
        assert verdict.ok
        if killed:
            os.kill(judge, signal.SIGKILL)
            until = time.monotonic() + 10
            while Path(f"/proc/{own}").exists() and time.monotonic() < until:
                time.sleep(0.02)
            assert set(children(above)) == {judge}  # it has ended, and `judges` asks how
    assert not any(Path(f"/proc/{pid}").exists() for pid in (own, spare, above)) and not home.exists()


@pytest.mark.gpu
def test_a_spare_on_a_gpu_has_its_context_and_no_memory_of_a_candidate(spares):
    with loaded(spares, gpu="cuda"):
        spare = spares.spare
    with loaded(spares, head=IN_A_CONTEXT, gpu="cuda") as process:
        process.look_at_memory()
        assert process.pid == spare.pid
    found = [judged(gate.Candidate("right", RIGHT), device="cuda") for spares.spares in (True, False)]
    assert found[0] == found[1] and found[0][0] == "accepted"
