"""`goldsmith gate --cluster local`: two Ray workers, of which one is killed; the verdicts are those of one machine."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from goldsmith.assay.gate.formats.problem_source import ProblemSource
from goldsmith.assay.gate.problem_pack import packed, unpacked
from goldsmith.cli import app

PROBLEM = """
from factor import FACTOR
from goldsmith import assay

def golden(x):
    return FACTOR * x

@assay.case(T=[1, 7])
def cases(make, T):
    return {"x": make.normal(T)}
"""
FORMS = ("2 * x", "x + x", "x * x", "x", "1 / 0", "x.add(x)", "x * 2.0001", "x.mul(2)", "-x", "2.0 * x")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problem").mkdir()
    (tmp_path / "problem/double.py").write_text(PROBLEM)
    (tmp_path / "problem/factor.py").write_text("FACTOR = 2\n")
    lines = [json.dumps({"id": str(n), "source": f"def candidate(x):\n    return {f}\n"}) for n, f in enumerate(FORMS)]
    (tmp_path / "made.jsonl").write_text("\n".join([*lines, "not json"]))
    return tmp_path


def gate(folder, *more):
    to = folder / f"{len(more)}.jsonl"
    command = ["gate", str(folder / "made.jsonl"), "--problem", str(folder / "problem/double.py"), "--seed", "3"]
    result = CliRunner().invoke(app, [*command, "--probes", "quick", "--json", str(to), *more])
    assert result.exit_code == 1, result.output
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    return [(row["candidate"], row["status"], row["reason"]) for row in rows]


def descendants(pid):
    found, left = [], [pid]
    while left:
        try:
            children = Path(f"/proc/{left[-1]}/task/{left.pop()}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
        left += map(int, children)
    return found


def kill_one_ray_worker(killed, stop):
    """Kills the first worker of this process's cluster that judges."""
    while not killed and not stop.is_set():
        for thread in os.listdir("/proc/self/task"):
            for child in Path(f"/proc/self/task/{thread}/children").read_text().split():
                for pid in [int(child), *descendants(int(child))]:
                    name = Path(f"/proc/{pid}/cmdline")
                    if name.exists() and name.read_bytes().startswith(b"ray::judge_batch") and not killed:
                        time.sleep(1.0)  # in the middle of its work
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
        time.sleep(0.1)


@pytest.mark.sweep(4)
def test_verdicts_of_a_cluster_are_those_of_one_machine_though_a_worker_is_killed(folder):
    pytest.importorskip("ray", reason="needs ray: pip install 'goldsmith[cluster]'")
    here = gate(folder)
    killed, stop = [], threading.Event()
    killer = threading.Thread(target=kill_one_ray_worker, args=(killed, stop), daemon=True)
    killer.start()
    there = gate(folder, "--cluster", "local", "--jobs", "2")
    stop.set()
    killer.join()
    assert killed and there == here
    assert [status for _, status, _ in here].count("accepted") == 5
    assert [name for name, _, _ in here] == [*map(str, range(10)), "made.jsonl:11"]


def test_a_packed_problem_is_read_elsewhere(folder, tmp_path, monkeypatch):
    pack = packed(ProblemSource(str(folder / "problem/double.py")))
    assert sorted(pack["files"]) == ["double.py", "factor.py"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = unpacked(pack)
    assert source == unpacked(pack) and Path(source.where).is_relative_to(tmp_path)
    assert source.load().golden(3) == 6


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://localhost:1", "[::1]:99999"])
def test_a_cluster_that_does_not_answer_is_one_sentence(folder, address, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    command = ["gate", str(folder / "made.jsonl"), "--problem", str(folder / "problem/double.py")]
    result = CliRunner().invoke(app, [*command, "--cluster", address])
    assert result.exit_code == 2 and f"--cluster {address}: no connection (" in " ".join(result.stderr.split())


def test_without_ray_the_command_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    command = ["gate", str(folder / "made.jsonl"), "--problem", str(folder / "problem/double.py")]
    result = CliRunner().invoke(app, [*command, "--cluster", "local"])
    assert result.exit_code == 2 and "pip install 'goldsmith[cluster]'" in " ".join(result.stderr.split())
