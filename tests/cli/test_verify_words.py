"""What `goldsmith verify` says: how a process ended, how many cases, under which name, and how kernels ran."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import goldsmith
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import (
    ErrorMap,
    Finding,
    Note,
    Row,
)
from goldsmith.cli import app
from goldsmith.cli.terminal import console
from goldsmith.cli.verify import command, display, worker_tasks
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.selection import Job
from goldsmith.cli.workers import pool
from goldsmith.core.device import triton_interpreted, triton_version

pytestmark = pytest.mark.sweep(5)

HERE = Path(__file__).resolve().parent
SOURCE = Path(goldsmith.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _from_the_folder_of_the_kernels(monkeypatch):
    monkeypatch.chdir(HERE)


def words(text):
    return " ".join(text.split())


def test_a_candidate_that_ends_its_process_is_named_in_the_last_sentence_and_loses_no_results(tmp_path):
    results = tmp_path / "results.json"
    names = ("aborting", "interrupting", "leaving", "target")
    command_line = ["verify", *(f"own_kernels:{name}" for name in names), "--json", str(results), "--jobs", "1"]
    result = CliRunner().invoke(app, command_line)
    assert result.exit_code == 1
    output = words(result.stdout)
    assert output.rpartition("JSON: ")[2].partition(" ")[2].rpartition(", ")[0] == (
        "3 of 4 checks failed: own_kernels:aborting ended by signal 6 (SIGABRT) in case rows[T=5]; "
        "interrupts raised KeyboardInterrupt in case rows[T=5] (4 checks, 8 cases"
    )
    assert "the process ended by signal 6 (SIGABRT) while the candidate ran, in crashes_deep" in output
    assert "Extension modules" not in output, "that is faulthandler's report, not the candidate's last line"
    assert "which would have ended the program: in interrupts" in output
    assert "the candidate raised in its forward (values): SystemExit: not today (own_kernels.py:" in output
    checks = json.loads(results.read_text())["proofs"]
    assert [p["verdict"] for p in checks] == ["fail", "fail", "fail", "pass"]
    assert [{row["case"] for row in p["report"]["rows"]} for p in checks[:3]] == [{"rows[T=1]"}] * 3


def test_each_target_has_its_own_message_and_a_wrong_declaration_is_not_blamed_on_the_machine(tmp_path):
    page = tmp_path / "page.html"
    names = [f"own_kernels:{name}" for name in ("talkative", "silent", "misdeclared")]
    result = CliRunner().invoke(app, ["verify", *names, "--jobs", "1", "--html", str(page)])
    output = words(result.stdout)
    assert "the process ended with status 3 while the candidate ran" in output
    assert "words of the first" not in output, "another target said that, in the same worker"
    assert "two declared wrongly" in output and "cannot run here" not in output
    assert "two: outputs: the golden returned 1 result, but the target declares 2: y, z" in output
    assert "1 target declared wrongly" in output and "1 target declared wrongly" in page.read_text()
    only = [Check("op", "", "cpu", [Job("a", "float32", "a")], problem="op: outputs", done=1)]
    fine = Check("b", "", "cpu", [Job("a", "float32", "a")], reports=[Report("b", cases=["a"])], done=1)
    assert "All checks passed" not in display.conclusion(command.VerifyOutcome([*only, fine], {}))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("lambda z: z, lambda x: x, cases={'x': 1.0}", "candidate: <lambda> takes 'z'"),
        ("lambda x: x, 3, cases={'x': 1.0}", "golden: expected a callable, got int 3"),
    ],
)
def test_a_wrong_declaration_is_reported_with_its_line_in_the_module(monkeypatch, tmp_path, wrong, words):
    (tmp_path / "several_declared.py").write_text(
        "from goldsmith import assay\n"
        "right = assay.Target(lambda x: x, lambda x: x, cases={'x': 1.0})\n"
        f"wrong = assay.Target({wrong})\n"
    )
    monkeypatch.chdir(tmp_path)
    request = {"backend": None, "device": None, "dtype": None, "interpret": False, "size": "default"}
    request_list = {"do": "list", "names": ["several_declared:right"], **request}
    problem = worker_tasks.VerifyTasks().answer(request_list)["problem"]
    assert "several_declared:right: a target declaration is wrong (" in problem
    assert f"several_declared.py, line 3): {words}" in problem
    sys.modules.pop("several_declared", None)


def test_a_workers_last_line_is_found_in_a_truncated_report():
    cut = pool.Died("by signal 11", 'in deep\n  File "a.py", line 3 in f\nExtension modules: numpy, torch (total: 2)')
    assert cut.last_line == "in deep"
    whole = pool.Died("by signal 11", "free(): invalid pointer\nFatal Python error: Aborted\n\nCurrent thread 0x1")
    assert whole.last_line == "free(): invalid pointer"


def test_sigterm_keeps_finished_checks(tmp_path):
    results, seen = tmp_path / "results.json", b""
    arguments = ["own_kernels:target", "own_kernels:hanging", "--jobs", "1", "--json", str(results)]
    with subprocess.Popen(
        [sys.executable, "-m", "goldsmith.cli", "verify", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            while b"pass" not in seen:  # the first check's line
                seen += process.stderr.read1()
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert words(out.decode()).endswith("in all; interrupted)")
    assert json.loads(results.read_text())["proofs"][0]["verdict"] == "pass"


def test_a_run_that_ended_early_does_not_claim_that_all_checks_passed():
    ran = Check("op", "", "cpu", [Job("a", "float32", "a")], reports=[Report("op", cases=["a"])], done=1)
    output = display.conclusion(
        command.VerifyOutcome([ran], {}, broken="A worker process ended by signal 9 (SIGKILL).")
    )
    assert (
        "No failures among the finished checks" in output
        and "ended early, because no worker process was left" in output
    )


def test_findings_and_notes_are_counted_with_the_option_that_shows_them(capsys):
    cases = ["a", "b", "c", "d"]
    findings = [Finding("CERTAIN", "layouts", "y", None, None, None, f"strides of {c}", c) for c in cases]
    findings += [Finding("CERTAIN", "values", "y", None, None, None, f"numbers of {c}", c) for c in cases]
    notes = [Note("tie", "i", "3 rows tie", "a"), Note("refused_layout", "x", "x must be dense", "a")]
    report = Report("op", "fail", findings=findings, cases=cases, notes=notes)
    entries = [Check("op", "", "cpu", [Job("a", "float32", "a")], reports=[report], done=1).entry()]

    def shown(every):
        display.failures(console(), entries, every=every)
        display.notes(console(), entries, every=every)
        return words(capsys.readouterr().out)

    brief, whole = shown(False), shown(True)
    assert "numbers of a" in brief and "strides" not in brief and "numbers of d" not in brief
    assert "and 5 further findings, also in 1 other case: --verbose shows them" in brief
    one = Report("op", "fail", findings=[f for f in findings if f.probe == "values"], cases=cases, notes=notes[:1])
    entries = [Check("op", "", "cpu", [Job("a", "float32", "a")], reports=[one], done=1).entry()]
    assert "and 1 further finding, in 1 other case: --verbose shows it" in shown(False)
    assert "1 note, not a fault (tie): --verbose shows it." in shown(False)
    assert "2 notes, not faults (refused layout, tie): --verbose shows them." in brief
    assert whole.find("numbers of d") < whole.find("strides of a") and "--verbose" not in whole
    assert 0 < whole.find("x must be dense") < whole.find("3 rows tie")


def test_files_are_written_before_a_reader_can_close_the_pipe(monkeypatch, tmp_path):
    check = Check("op", "", "cpu", [Job("a", "float32", "a")], reports=[Report("op", cases=["a"])], done=1)
    machine = {"cpu": "a", "cores": 2, "torch": "2", "triton": None, "gpus": []}
    monkeypatch.setattr(command, "verify", lambda request, err: command.VerifyOutcome([check], machine))

    def closed(*arguments):
        raise BrokenPipeError

    monkeypatch.setattr(display, "matrix", closed)
    with pytest.raises(BrokenPipeError):
        command.run(command.VerifyRequest(), html=tmp_path / "page.html", json_to=str(tmp_path / "all.json"))
    assert json.loads((tmp_path / "all.json").read_text())["ok"]
    assert (tmp_path / "page.html").read_text().endswith("</html>")


def listed(*names):
    request = {"backend": None, "device": None, "dtype": None, "interpret": False, "size": "default"}
    return worker_tasks.VerifyTasks().answer({"do": "list", "names": list(names), **request})["checks"]


def test_a_target_without_a_name_is_named_as_the_user_typed_it():
    assert [p["operator"] for p in listed("own_kernels:partial", "own_kernels:target")] == [
        "own_kernels:partial",
        "scaled",
    ]
    assert [p["operator"] for p in listed("own_kernels:nameless")] == [
        "own_kernels:nameless#1",
        "own_kernels:nameless#2",
    ]


def check(name, case, dtype="float32", probes=("values",), backend="", **more):
    request = {"do": "check", "source": name, "index": 0, "name": name, "backend": backend, "device": "cpu", "seed": 0}
    return worker_tasks.VerifyTasks().answer(
        {**request, "case": case, "label": case, "dtype": dtype, "probes": list(probes), "cost": 1, **more}
    )


def test_only_kernels_that_ran_in_the_interpreter_are_marked_so():
    assert listed("own_kernels:target")[0]["how"] == ""
    assert check("own_kernels:target", "rows[T=1]")["interpreted"] is False
    if triton_interpreted():
        assert check("mhc.expand", "three_streams", backend="triton")["interpreted"] is True


def test_versions_are_recorded_for_the_first_target_too():
    assert check("own_kernels:target", "rows[T=1]")["report"]["environment"]["triton"] == triton_version()


def test_the_second_run_in_float32_is_not_a_case_of_its_own():
    reply = check("own_kernels:little", "rows[T=5]", "bfloat16", ("values", "ensemble", "float32"))
    report = Report.from_json(reply["report"])
    assert report.cases == ["rows[T=5]"] and {r.case for r in report.rows} == {"rows[T=5]"}
    assert {(r.dtype, r.run) for r in report.rows} >= {
        ("float32", "float32 inputs"),
        ("bfloat16", "values"),
    }
    assert {(f.case, f.probe) for f in report.findings} == {("rows[T=5]", "float32")}
    assert all(f.text.endswith("(float32 inputs)") for f in report.findings)
    assert {m.run for m in report.maps.values()} == {"float32 inputs"}
    little = Check("little", "", "cpu", [Job("rows[T=5]", "bfloat16", "rows[T=5]")], reports=[report], done=1)
    console = display.Console(width=100, file=None, record=True, quiet=False)
    console.print(display.matrix([little.entry()], {}))
    assert " 0/1 " in console.export_text()
    assert "(1 check, 1 case" in display.conclusion(command.VerifyOutcome([little], {}))


def test_a_case_that_was_not_judged_is_not_counted():
    jobs = [Job(name, "float32", name) for name in "ab"]
    reports = [Report("op", cases=["a"], rows=[Row("a", "values", "y", "output", "float32", (1,), 0.0)])]
    reports.append(Report("op", cases=["b"], notes=[Note("not_judged", "op", "cannot run in the interpreter", "b")]))
    check = Check("op", "", "cpu", jobs, reports=reports, done=2)
    assert [job.label for job in check.judged] == ["a"]
    assert display._line(check).startswith("[green]pass[/]  op  [dim]1 case,")
    assert "(1 check, 1 case" in display.conclusion(command.VerifyOutcome([check], {}))


def test_a_float32_run_does_not_replace_a_dtype_that_was_not_judged():
    twin = Row("a float32", "values", "y", "output", "float32", (1,), 0.0)
    note = Note("not_judged", "op", "bfloat16 was not judged", "a")
    one = worker_tasks.one_case(Report("op", rows=[twin], notes=[note], cases=["a", "a float32"]), "a")
    assert one.cases == ["a"] and one.rows == [twin]
    bad = Finding("CERTAIN", "float32", "y", None, 2.0, 1.0, "y is off", "a float32")
    maps = {key: ErrorMap("y", key, (1, 1), [[1.0]], [[2.0]], [[9.0]], bad=key != "a") for key in ("a", "a float32")}
    one = worker_tasks.one_case(Report("op", "fail", [bad], [note], [twin], maps=maps, cases=["a", "a float32"]), "a")
    assert [f.case for f in one.findings] == ["a"] and one.maps["a y"].run == "float32 inputs"
