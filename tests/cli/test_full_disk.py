"""A page or JSON that cannot be written costs no result: the table, the exit status and the other file are as ever."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import FAIL, Finding
from goldsmith.cli import app
from goldsmith.cli.bench.session import session
from goldsmith.cli.verify import command, display
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.selection import Job

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")

FULL = Path("/dev/full")
WORDS = "Cannot write /dev/full: No space left on device."


@pytest.fixture
def outcome(monkeypatch):
    """Replaces the run of `verify` by one check that passed or failed."""

    def known(status):
        findings = [Finding("CERTAIN", "values", "y", None, 9.0, 1.0, "y is wrong", "a")] if status else []
        report = Report("op", FAIL if status else "pass", findings=findings, cases=["a"])
        check = Check("op", "", "cpu", [Job("a", "float32", "a")], reports=[report], done=1)
        machine = {"cpu": "a", "cores": 2, "torch": "2", "triton": None, "gpus": []}
        monkeypatch.setattr(command, "verify", lambda request, err: command.VerifyOutcome([check], machine))

    return known


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("lost", ["--html", "--json"])
def test_verify_shows_its_table_and_keeps_status_and_the_other_file(outcome, tmp_path, status, lost):
    outcome(status)
    other = {"--html": "--json", "--json": "--html"}[lost]
    result = CliRunner().invoke(app, ["verify", lost, str(FULL), other, str(tmp_path / "kept")])
    assert result.exit_code == status
    assert "error / bound" in result.stdout and ("1 of 1 check failed" if status else "passed") in result.stdout
    assert " ".join(result.stderr.split()) == WORDS and "/dev/full" not in result.stdout
    assert (tmp_path / "kept").stat().st_size and f": {tmp_path / 'kept'}" in result.stdout


def test_an_error_of_the_page_itself_loses_no_table(outcome, monkeypatch, tmp_path):
    outcome(1)

    def broken(*arguments, **options):
        raise RuntimeError("the template is wrong")

    monkeypatch.setattr("goldsmith.assay.report.html.page.write", broken)
    result = CliRunner().invoke(app, ["verify", "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1 and "y is wrong" in result.stdout
    assert "RuntimeError: the template is wrong" in " ".join(result.stderr.split())


def test_the_table_is_printed_before_a_file_is_written(outcome, monkeypatch, tmp_path):
    outcome(0)
    order = []
    monkeypatch.setattr(display, "failures", lambda *arguments, **options: order.append("table"))
    monkeypatch.setattr("goldsmith.assay.report.html.page.write", lambda *a, **k: order.append("page"))
    CliRunner().invoke(app, ["verify", "--html", str(tmp_path / "page.html")])
    assert order == ["table", "page"]


def test_bench_still_measures_and_shows_the_rows_that_follow(capsys):
    class Row:
        verified = None

        def to_json(self):
            return {"case": "a"}

    with session("cpu", str(FULL), "abc") as run:
        run.write([Row()])
        run.write([Row()])
        run.shown = 2
    assert run.end("") == 0
    assert " ".join(capsys.readouterr().err.split()).count("Cannot write /dev/full: No space left on device") == 1


@pytest.mark.parametrize("status", [0, 1])
def test_a_full_stdout_is_one_sentence_and_keeps_status_and_files(outcome, monkeypatch, capsys, tmp_path, status):
    outcome(status)
    with FULL.open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            app(["verify", "--json", str(tmp_path / "kept")], prog_name="goldsmith")
    assert ended.value.code == status and (tmp_path / "kept").stat().st_size
    assert capsys.readouterr().err.split("\n")[:-1] == ["stdout cannot be written to: No space left on device."]


def test_gate_shows_its_verdicts_if_their_json_is_lost(tmp_path):
    (tmp_path / "made.jsonl").write_text('{"id": "first", "source": "x = ("}\n')
    (tmp_path / "problem.py").write_text("def golden(x):\n    return x\n")
    result = CliRunner().invoke(
        app, ["gate", str(tmp_path / "made.jsonl"), "--problem", str(tmp_path / "problem.py:none"), "--json", str(FULL)]
    )
    assert not isinstance(result.exception, OSError) and WORDS in " ".join(result.stderr.split())
