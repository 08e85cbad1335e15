"""The benchmark of the gate's throughput: its candidates differ, and its look at what is left sees what is there."""

import subprocess
import sys
import uuid

from benchmarks.gate import hostile, throughput
from goldsmith.assay.gate import GateOptions, Limits


def test_no_two_candidates_are_equal():
    every = throughput.made(40)
    assert len({m.candidate.source for m in every}) == len({m.candidate.name for m in every}) == 40
    assert sum(m.right for m in every) == 20
    for m in every:
        compile(m.candidate.source, m.candidate.name, "exec")


def test_a_process_that_is_left_is_seen():
    mark = uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"MARK": mark}) as process:
        (found,) = hostile._processes(mark)
        assert found.startswith(f"{process.pid} ")
    assert hostile._processes(mark) == []


def test_a_small_hostile_batch_gets_every_verdict_and_leaves_nothing():
    with throughput.problem_file() as problem:
        options = GateOptions(limits=Limits(2, 6, 1 << 30), seed=1, probes="values")
        row = hostile.run(problem, 12, 1, options)
    assert (row["missing"], row["left_processes"], row["left_files"], row["unexpected"]) == (0, [], [], [])
    assert {"accepted", "wrong", "crashed", "refused"} <= row["statuses"].keys()
