"""`goldsmith verify` as a user runs it, on kernels of their own and on ours: matrix, evidence, files, exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import goldsmith
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import Finding, Note, ProbeRun
from goldsmith.cli import app
from goldsmith.cli.verify import command, display, merged_report
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.selection import Job
from goldsmith.cli.verify.worker_tasks import VerifyTasks
from goldsmith.core.device import interpreter_unavailable

pytestmark = pytest.mark.sweep(5)

HERE = Path(__file__).resolve().parent
SOURCE = Path(goldsmith.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _from_the_folder_of_the_kernels(monkeypatch):
    monkeypatch.chdir(HERE)


def run(*arguments, jobs=1):
    """One worker where it does not matter how many: a second one would only load torch again."""
    return CliRunner().invoke(app, ["verify", "--jobs", str(jobs), *arguments])


HOLLOW = """
import torch
from goldsmith import assay

none = assay.Target(lambda x: x, lambda x: x, cases={"x": torch.zeros(0, 3)}, name="none")


@assay.case(T=[0, 2])
def rows(make, T):
    return {"x": make.normal(T, 3)}


some = assay.Target(lambda x: x, lambda x: x, cases=rows, name="some")
"""


def words(text):
    return " ".join(text.split())


def test_right_kernels_pass_whatever_they_print(tmp_path):
    page, results = tmp_path / "new" / "page.html", tmp_path / "results.json"
    result = run("own_kernels:several", "--html", str(page), "--json", str(results), jobs=2)
    assert result.exit_code == 0, result.output
    assert "All checks passed (2 checks, 4 cases" in words(result.stdout)
    assert "Run: 4 cases with all probes." in words(result.stdout)
    data = json.loads(results.read_text())
    assert {"schema", "goldsmith", "ok", "interrupted", "remarks", "seconds", "machine", "proofs"} <= set(data)
    assert data["ok"] and [p["operator"] for p in data["proofs"]] == ["scaled", "prints"]
    reports = [Report.from_json(p["report"]) for p in data["proofs"]]
    assert all(report.ok and report.cases == ["rows[T=1]", "rows[T=5]"] for report in reports)
    assert reports[0].stages == ["scaled", "y", "x.grad"]
    text = page.read_text()
    assert "<h1>Everything tried here holds.</h1>" in text and "2 targets, 2 checks, 4 cases" in text
    assert "operator" not in words(re.sub("<style>.*?</style>|<script>.*?</script>", "", text, flags=re.S))
    assert "Run: 4 cases with all probes." in text


def test_a_wrong_kernel_and_one_that_crashes_do_not_affect_the_others(tmp_path):
    results = tmp_path / "results.json"
    result = run("own_kernels:wrong", "own_kernels:crashing", "own_kernels:target", "--json", str(results), jobs=2)
    assert result.exit_code == 1
    output = words(result.stdout)
    assert "2 of 3 checks failed" in output
    assert "FAIL off case rows[T=1], probe values, CERTAIN y exceeds its rounding bound" in output
    assert "the process ended by signal 11 (SIGSEGV) while the candidate ran, in crashes" in output
    assert "The process ended in 1 case; the remaining probes of these cases did not run." in output
    assert "its last line: 'about to fall over'" in output
    checks = {p["operator"]: p for p in json.loads(results.read_text())["proofs"]}
    assert {name: p["verdict"] for name, p in checks.items()} == {"off": "fail", "crashes": "fail", "scaled": "pass"}
    assert checks["crashes"]["report"]["cases"] == ["rows[T=1]", "rows[T=5]"]
    assert {f["case"] for f in checks["crashes"]["report"]["findings"]} == {"rows[T=5]"}


def test_a_wrong_golden_and_a_case_that_cannot_be_drawn_are_not_reported_as_a_wrong_kernel(tmp_path):
    results = tmp_path / "results.json"
    result = run("own_kernels:at_fault", "own_kernels:undrawn", "--quick", "--json", str(results))
    assert result.exit_code == 1
    assert "REFERENCE" in result.stdout and "the golden computes in float32" in words(result.stdout)
    result = run("own_kernels:undrawn", "own_kernels:target", "--json", str(results))
    assert result.exit_code == 2
    assert "could not be drawn: RuntimeError: the file with the inputs is gone" in words(result.stdout)
    checks = {p["operator"]: p for p in json.loads(results.read_text())["proofs"]}
    assert checks["scaled (own_kernels:target)"]["verdict"] == "pass"
    assert checks["scaled (own_kernels:undrawn)"]["verdict"] == "partial"


def test_an_operator_is_checked_on_every_backend_and_the_output_says_how_and_which_cases_did_not_run():
    result = run("mhc.expand", "--quick", "--interpret", "--json", "-")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    reason = interpreter_unavailable()
    assert [(p["backend"], p["how"], p["verdict"]) for p in data["proofs"]] == [
        ("triton", "interpreter", "pass" if reason is None else "absent"),
        ("reference", "", "pass"),
    ]
    output = words(result.stderr)
    assert "Triton kernels ran in Triton's interpreter on the CPU (--interpret)" in output
    assert "cases left out by --quick" in output
    if reason is None:
        assert "All checks passed (2 checks, 2 cases" in output
    else:
        assert f"Not run: {reason} (mhc.expand on triton)" in output and "All checks passed (1 check, 1 case" in output


def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process_behind(tmp_path):
    results, seen = tmp_path / "results.json", b""
    arguments = [
        "own_kernels:target",
        "own_kernels:hanging",
        "own_kernels:wrong",
        "--jobs",
        "1",
        "--json",
        str(results),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-m", "goldsmith.cli", "verify", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            while b"pass" not in seen:  # the first check's line
                seen += process.stderr.read1()
            time.sleep(1)
            workers = children(process.pid)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"Interrupted. These results were finished:" in err and b"Traceback" not in err
    assert b"No failures among the finished checks" in out
    checks = json.loads(results.read_text())["proofs"]
    assert [p["verdict"] for p in checks] == ["pass", "absent", "absent"] or checks[1]["verdict"] == "partial"
    assert workers and not any(alive(pid) for pid in workers)


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nosuch"], "unknown operator 'nosuch'; known: experts.linear, experts.moe, experts.slots, mhc.boundary"),
        (
            ["mhc", "--html", "/proc/none/page.html"],
            "cannot write /proc/none/page.html: there is no folder /proc/none.",
        ),
    ],
)
def test_a_request_that_cannot_run_is_one_paragraph_and_status_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in words(result.stderr) and "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "options, message",
    [
        ({"names": ["nosuch"]}, "unknown operator 'nosuch'; known: experts.linear"),
        ({"names": ["nosuch"]}, "families: experts, mhc, "),
        ({"names": ["nosuch"]}, ". Name a target of your own as module:target, path/to/file.py:target, or a module"),
        ({"names": ["a_folder"]}, "a_folder is a folder; name one of its files, as a_folder/FILE.py."),
        ({"names": ["a_folder/text.txt"]}, "a_folder/text.txt is not a Python file. Name a target of your own as"),
        ({"names": ["no_such_file.py"]}, "there is no file no_such_file.py."),
        ({"names": ["no_such_module:target"]}, "no module 'no_such_module' is in the current directory or installed"),
        (
            {"names": ["own_kernels:nosuch"]},
            "own_kernels has no 'nosuch'; its targets are: aborting, at_fault, colourful, crashing",
        ),
        (
            {"names": ["own_kernels:not_a_target"]},
            "is an object of type int; expected a goldsmith.assay.Target or a list of them.",
        ),
        ({"names": ["mhc"], "backend": "cuda"}, "unknown backend 'cuda'; known: reference, triton"),
        ({"names": ["mhc"], "device": "tpu"}, "--device tpu: not a device; use cpu, cuda or cuda:1"),
        ({"names": ["mhc"], "device": "cuda:99"}, "--device cuda:99: "),
    ],
)
def test_a_wrong_name_is_answered_with_what_exists(options, message, tmp_path, monkeypatch):
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_folder" / "text.txt").write_text("text")
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(tmp_path)
    request = {"do": "list", "backend": None, "device": None, "dtype": None, "interpret": False, "size": "default"}
    assert message in VerifyTasks().answer(request | options)["problem"]


def test_a_module_that_fails_on_import_is_reported_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("import math\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    request = {"do": "list", "backend": None, "device": None, "dtype": None, "interpret": False, "size": "default"}
    problem = VerifyTasks().answer({**request, "names": ["breaks_on_import:target"]})["problem"]
    assert "importing breaks_on_import failed with ValueError: math domain error" in problem
    assert "breaks_on_import.py, line 2" in problem


def test_a_missing_module_that_a_golden_needs_is_no_fault_of_the_golden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("needs_a_module.py").write_text(
        "import torch\nfrom goldsmith import assay\n"
        "def golden(x):\n    import no_such_module\n    return x\n"
        "target = assay.Target(lambda x: x, golden, cases={'x': torch.ones(3)})\n"
    )
    result = run("needs_a_module:target")
    assert result.exit_code == 2
    text = words(result.output)
    assert "No module named 'no_such_module'. Nothing was judged" in text
    assert "golden raised" not in text


def test_a_worker_that_cannot_start_is_reported_with_its_last_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = run("mhc.expand")
    assert result.exit_code == 2
    assert "ended with status 1. It printed nothing more." in words(result.stderr)


def test_a_backend_that_cannot_run_is_a_row_with_its_reason():
    reason = "needs a CUDA device; the inputs are on cpu"
    check = Check("mhc.post", "triton", "cpu", [], "", reason)
    ran = Check("mhc.post", "reference", "cpu", [Job("a", "float32", "a")], reports=[report("a")], done=1)
    outcome = command.VerifyOutcome([check, ran], {})
    assert outcome.status == 0
    assert display.remarks(outcome.entries)[0] == f"Not run: {reason} (mhc.post on triton)."
    assert command.VerifyOutcome([check], {}).status == 2, "nothing was checked"
    assert "Nothing was checked" in display.conclusion(command.VerifyOutcome([check], {}))


def test_a_check_without_judged_cases_does_not_pass():
    note = Note("not_judged", "k", "cannot run in the interpreter: no atomics", "a")
    check = Check("kernel", "", "cpu", [Job("a", "float32", "a")], done=1)
    check.reports = [Report("kernel", cases=["a"], notes=[note])]
    assert check.entry().report is None and "no atomics" in check.entry().reason
    assert command.VerifyOutcome([check], {}).status == 2


def report(*cases, probes=(), findings=(), **options):
    return Report("mhc.post", cases=list(cases), probes=list(probes), findings=list(findings), **options)


def test_reports_are_merged_with_their_costs_added_and_each_note_once():
    note = Note("tie", "y", "two scores are equal", "a")
    runs = [ProbeRun("values", True, "", 1.0, 2), ProbeRun("taint", True, "", 3.0, 9)]
    skipped = [ProbeRun("values", True, "", 0.5, 2), ProbeRun("taint", False, "not selected")]
    bad = Finding("CERTAIN", "values", "y", None, 2.0, 1.0, "y is wrong", "b")
    environment = {"torch": "2", "runs": {"candidate": 5, "golden": 7}}
    merged = merged_report.merge(
        "mhc.post",
        [
            report("a", probes=runs, notes=[note], seconds=4.0, environment=environment),
            report(
                "b", probes=skipped, notes=[note], seconds=1.0, environment=environment, findings=[bad], verdict="fail"
            ),
        ],
    )
    assert (merged.verdict, merged.cases, merged.seconds, len(merged.notes)) == ("fail", ["a", "b"], 5.0, 1)
    values, taint = merged.probes
    assert (values.seconds, values.runs, values.reason) == (1.5, 4, "")
    assert (taint.ran, taint.reason) == (True, "1 of 2 cases; the others with --thorough")
    assert merged.environment["runs"] == {"candidate": 10, "golden": 14}


def test_cases_keep_their_order_whatever_worker_finishes_first():
    check = Check("op", "", "cpu", [Job(name, "float32", name) for name in "abcd"], done=4)
    check.reports = [report("d"), report("b"), report("a")]
    check.skipped = {"c": "it takes float64 only"}
    assert check.report().cases == ["a", "b", "c", "d"]


def test_the_longest_cases_begin_first_then_the_costliest_operator_and_two_operators_do_not_go_in_step():
    def jobs(check, dtype, costs):
        return [{"check": check, "dtype": dtype, "case": str(k), "cost": cost} for k, cost in enumerate(costs)]

    small = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05]
    both = [*small, 5.0]
    listed = [*jobs(0, "float32", [*small[:2], 20.0]), *jobs(1, "float32", both), *jobs(2, "float32", both)]
    ordered = command.costliest_first(listed)
    assert ordered == command.costliest_first(listed) and len(ordered) == len(listed)
    assert [job["check"] for job in ordered] == [0, *[1] * 7, *[2] * 7, *[0] * 2]
    assert command._group(ordered[0]) == (0, "float32", "2") and len({command._group(j) for j in ordered}) == 4
    first, second = ([job["case"] for job in ordered if job["check"] == check] for check in (1, 2))
    assert first[0] == second[0] == "6" and first != second


def test_a_reference_fault_is_not_hidden_by_cases_that_pass():
    assert merged_report.merge("op", [report("a"), report("b", verdict="reference_fault")]).verdict == "reference_fault"
    faults = [report("a", verdict="reference_fault"), report("b", verdict="fail")]
    assert merged_report.merge("op", faults).verdict == "fail"


def test_cases_left_out_are_counted_over_all_checks():
    checks = [Check("a", "b", "cpu", [], left_out=[(n, "large cases")]) for n in (2, 3)]
    checks[0].left_out.append((1200, "small cases"))
    assert display.left_out(checks) == ["Not run: 5 large cases; 1,200 small cases."]
    assert display.left_out([Check("a", "b", "cpu", [], left_out=[(1, "large cases (run on a GPU)")])]) == [
        "Not run: 1 large case (run on a GPU)."
    ]
    assert display.left_out([]) == []


def test_the_backend_option_is_rejected_for_a_users_target():
    result = run("own_kernels:several", "--backend", "triton")
    assert result.exit_code == 2
    assert "--backend triton selects a backend of goldsmith's operators" in words(result.stderr)


def test_a_syntax_error_in_a_module_is_reported_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "unreadable.py").write_text("x = 1\ny = = 2\n")
    monkeypatch.chdir(tmp_path)
    output = words(run("unreadable:target").output)
    assert "SyntaxError" in output and "unreadable.py, line 2" in output and "targets.py" not in output


SHORT = """
from pathlib import Path
import torch
from goldsmith import assay

def golden_of(always):
    def golden(x):
        tried = Path("tried")
        if len(x) == 5 and (always or not tried.exists()):
            tried.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        return x * 2
    return golden

@assay.case(T=[3, 5])
def rows(make, T):
    return {"x": make.normal(T, 4)}

alone = assay.Target(lambda x: x * 2, golden_of(False), cases=rows, backward=None)
never = assay.Target(lambda x: x * 2, golden_of(True), cases=rows, backward=None)
"""


@pytest.mark.sweep(5, part=0)
def test_a_case_that_ran_out_of_memory_is_retried_alone_and_then_reported_as_not_run(tmp_path, monkeypatch):
    (tmp_path / "short_of_memory.py").write_text(SHORT)
    monkeypatch.chdir(tmp_path)
    result = run("short_of_memory:alone", "--jobs", "2")
    assert result.exit_code == 0 and "2/2" in result.stdout and "out of memory" not in result.stdout
    result = run("short_of_memory:never", "--jobs", "2")
    output = words(result.stdout)
    assert result.exit_code == 0 and "1/1" in output and "REFERENCE" not in output
    assert "Not run: " in output and "2.00 GiB" in output


def test_a_target_without_a_verdict_is_not_said_to_lack_a_backend():
    check = Check("kernel", "", "cpu", [], reason="it has no placements")
    outcome = command.VerifyOutcome([check], {})
    assert display.conclusion(outcome) == "[yellow]Nothing was checked[/]"
    assert "not judged" in str(list(display.matrix(outcome.entries, {}).columns[2].cells))


def test_a_target_whose_results_have_no_element_does_not_pass(tmp_path):
    (tmp_path / "hollow.py").write_text(HOLLOW)
    result = run(str(tmp_path / "hollow.py:none"))
    assert result.exit_code == 2 and "no result has an element" in words(result.stdout)
    assert "Nothing was checked" in result.stdout
    assert run(str(tmp_path / "hollow.py:some")).exit_code == 0
