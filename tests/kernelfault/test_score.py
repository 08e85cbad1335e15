"""KernelFault's driver and figures: a few faults end to end, going on after an abrupt end, intervals, calibration."""

import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest

from benchmarks import intervals
from benchmarks.kernelfault import calibration, catalogue, figures, page, runner
from goldsmith.assay.diagnosis.causes import rank
from repo.tree import ROOT

pytestmark = pytest.mark.sweep(2)

SCORE = [sys.executable, "-m", "benchmarks.kernelfault"]


def plan(*keys, **more):
    chosen = tuple(f for f in catalogue.faults() if f.key in keys)
    assert len(chosen) == len(keys)
    return runner.Selection(chosen, (), **{"seeds": 1, "clean": 0, "quick": True, **more})


def run(what, path, workers=1):
    kept = runner.KeptRows(path)
    for _ in runner.run(what, kept, workers):
        pass
    return kept


def row(key, verdict="fail", stage=None, causes=(), **more):
    causes = [{"id": id, "score": 0.9, "params": {}} for id in causes]
    fault = next(f for f in catalogue.faults() if f.key == key)
    facts = {"kind": "fault", "job": key, "fault": key, "host": fault.host.name, "backend": fault.backend}
    return {
        **facts, "case": "c", "seed": 0, "verdict": verdict, "stage": stage, "causes": causes, "raw": {}, "notes": [],
        "findings": [], "sizes": {}, "small": {}, "seconds": 1.0, **more,
    }  # fmt: skip


def test_a_fault_is_found_with_stage_and_cause_but_a_tie_and_a_faulty_golden_are_not_accused(tmp_path):
    what = plan("M03 router_scatter torch", "M01 router torch", "M15 rmsnorm torch")
    kept = run(what, tmp_path / "rows.jsonl", workers=2)
    rows = {r["fault"]: r for r in kept.rows if "seed" in r}
    assert rows["M03 router_scatter torch"]["stage"] == "dsy"
    assert rows["M03 router_scatter torch"]["causes"][0]["id"] == "uninitialised_accumulator"
    summary = figures.summarise(kept.rows)
    assert summary["rates"]["all"]["top1"]["hits"] == summary["rates"]["all"]["detected"]["of"] == 1
    assert (summary["accused"]["hits"], summary["accused"]["of"]) == (0, 2)


def test_an_interrupted_run_continues_and_repeats_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    what = plan("M03 router_scatter torch", seeds=2)
    whole = run(what, path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][: len(lines[2]) // 2])  # as kill -9 leaves it
    again = run(what, path)
    assert [(r["case"], r["seed"]) for r in again.rows if "seed" in r] == [
        (r["case"], r["seed"]) for r in whole.rows if "seed" in r
    ]
    before = path.read_text()
    run(what, path)
    assert path.read_text() == before


def test_kept_rows_depend_on_the_assay_and_on_their_own_kernel(tmp_path, monkeypatch):
    what = plan("M04 mhc_backward torch", "M16 mhc_pre reference", "M03 router_scatter torch", clean=2)
    right_kernels = "benchmarks/assay/right_kernels"
    tree = tmp_path / "tree"
    for part in ("src/goldsmith", "benchmarks/kernelfault", right_kernels):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, tree / part)
    monkeypatch.setattr(runner, "ROOT", tree)
    monkeypatch.setattr(runner, "HERE", tree / "benchmarks" / "kernelfault")

    def state():
        return runner.digest(what), [job["of"] for job in what.jobs()]

    def changed(path):
        before = state()
        with (tree / path).open("a") as file:
            file.write("# changed\n")
        after = state()
        return [before[0] != after[0], *(a != b for a, b in zip(before[1], after[1], strict=True))]

    # the assay; a fault of each of three hosts, of which we ship the second; clean runs
    assert changed("src/goldsmith/assay/diagnosis/causes/rules/state.py") == [True, False, False, False, False]
    assert changed("benchmarks/kernelfault/worker.py") == [True, False, False, False, False]
    assert changed("benchmarks/kernelfault/specimens/router_scatter.py") == [False, False, False, True, False]
    assert changed("src/goldsmith/mhc/_formulas.py") == [False, False, True, False, False]
    for name in ("draws", "kinks", "sums", "views"):
        assert changed(f"{right_kernels}/{name}.py") == [False, False, False, False, True]
    for other in (
        "src/goldsmith/assay/report/html/page.py",
        "src/goldsmith/router/modules.py",
        "benchmarks/kernelfault/page.py",
    ):
        assert changed(other) == [False] * 5


def test_rows_of_a_changed_host_are_repeated_and_rows_of_another_assay_are_refused(tmp_path):
    what = plan("M03 router_scatter torch")
    kept = runner.KeptRows(tmp_path / "rows.jsonl")
    assert kept.belongs("one") and not runner.KeptRows(kept.path).belongs("another")
    job = what.jobs()[0]
    kept.add({"job": job["name"], "of": "before", "case": "c", "seed": 0})
    assert kept.of(job) == []
    kept.add({**runner.row_head(job), "case": "c", "seed": 0})
    assert len(kept.of(job)) == 1


def test_a_child_that_dies_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    job = json.loads(line)\n"
        "    done = [c for c, _ in job['done']]\n"
        "    for case in [c for c in ('one', 'two', 'three') if c not in done]:\n"
        "        at = {'kind': 'fault', 'fault': job['fault'], 'host': 'h', 'backend': 'b', 'case': case, 'seed': 0}\n"
        "        print(json.dumps({'begin': at}), flush=True)\n"
        "        if case == 'two':\n"
        "            os.abort()\n"
        "        print(json.dumps({**at, 'verdict': 'fail'}), flush=True)\n"
        "    print(json.dumps({'end': 1}), flush=True)\n"
    )
    monkeypatch.setattr(runner, "HERE", tmp_path)
    kept = run(plan("M03 router_scatter torch"), tmp_path / "rows.jsonl")
    assert [(r["case"], r["verdict"]) for r in kept.rows if "seed" in r] == [
        ("one", "fail"), ("two", "died"), ("three", "fail"),
    ]  # fmt: skip
    assert kept.rows[1]["died"] == "the process ended with -6"


def test_an_answer_is_judged_by_the_truth_about_its_fault():
    key = "M04 mhc_backward torch"
    sizes = {"n": 4, "D": 48}
    good = row(key, stage="h_pre.grad", causes=["truncated_reduction"], sizes=sizes)
    good["causes"][0]["params"] = {"missing": [[32, 48]]}
    fault = next(f for f in catalogue.faults() if f.key == key)
    assert all(figures.judged(good, fault).values())
    second = row(key, stage="x.grad", causes=["wrong_mask", "truncated_reduction"], sizes=sizes)
    assert figures.judged(second, fault) == {
        "detected": True, "stage": False, "top1": False, "top3": True, "params": False,
    }  # fmt: skip
    assert not any(figures.judged(row(key, verdict="pass", sizes=sizes), fault).values())


def test_accusations_are_counted():
    summary = figures.summarise([row("M01 router torch", verdict="fail", causes=["wrong_decision"])])
    assert summary["accused"]["hits"] == 1
    assert summary["rates"]["all"]["detected"]["of"] == 0


def test_wilson_is_the_95_percent_interval():
    assert intervals.wilson(0, 3000)[1] == pytest.approx(0.00128, abs=1e-5)
    low, high = intervals.wilson(78, 80)
    assert (low, high) == (pytest.approx(0.9134, abs=1e-3), pytest.approx(0.9931, abs=1e-3))
    assert intervals.wilson(0, 0) is None


def test_calibration_excludes_held_out_hosts_and_is_monotonic():
    held_out_key = [f.key for f in catalogue.faults() if f.host.held_out and f.counted][0]
    mine = "M05 mhc_backward torch"
    rows = [row(mine, raw={"wrong_factor": 0.9, "wrong_mask": 0.75}) for _ in range(12)]
    rows += [row(mine, raw={"wrong_mask": 0.5, "wrong_factor": 0.4})]
    points, used = calibration.fitted(rows)
    assert calibration.fitted([*rows, row(held_out_key, raw={"missing_term": 0.1})]) == (points, used)
    assert used == 13
    assert (calibration.FIRST, calibration.OTHER) == (rank.FIRST, rank.OTHER)
    assert points == {"first": [[0.5, 0.25], [0.9, 0.9615]], "other": [[0.4, 0.1333], [0.75, 0.1333]]}
    assert all(a[1] <= b[1] for line in points.values() for a, b in zip(line, line[1:], strict=False))


def test_the_page_escapes_what_kernels_say(tmp_path):
    summary = figures.summarise([row("M05 mhc_backward torch", findings=["<script>alert(1)</script>"], case="<b>")])
    summary["conditions"] = dict.fromkeys(("command", "machine", "torch", "triton", "python", "date"), "x")
    text = page.render(summary)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert figures.AUTHOR in text


def test_figures_are_plain_json():
    summary = figures.summarise([row("M05 mhc_backward torch", stage="bias.grad", causes=["wrong_factor"])])
    assert json.loads(json.dumps(summary)) == summary
    assert math.isclose(summary["rates"]["development"]["stage"]["share"], 1.0)


def test_an_unknown_host_is_refused_in_one_sentence():
    done = subprocess.run([*SCORE, "--host", "nobody"], capture_output=True, text=True, env=os.environ, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("no host 'nobody'; there are: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_worker_ends_with_its_parent_even_if_its_input_stays_open():
    reading, writing = os.pipe()
    worker = str(ROOT / "benchmarks/kernelfault/worker.py")
    starts = f"import subprocess, sys; w = subprocess.Popen([sys.executable, {worker!r}], stdin={reading})\n"
    starts += "import time; time.sleep(1); print(w.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, pass_fds=[reading])
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.1)
    left = _runs(pid)
    os.close(writing), os.close(reading)
    assert not left


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
