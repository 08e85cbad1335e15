"""`goldsmith diagnose` of kernels that do not end: which run it was, what was found before, and when it is given up."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import endless_kernels
from goldsmith import assay
from goldsmith.cli import app
from goldsmith.cli.diagnose import deadlines
from goldsmith.cli.diagnose.deadlines import RunDeadline
from goldsmith.cli.workers import pool

pytestmark = pytest.mark.sweep(5)

HERE = Path(__file__).resolve().parent
FIRST_S = 6  # a busy machine takes a second or two to reach the kernel of a first run


def run_command(monkeypatch, *arguments, budget, deaf=False):
    """What a command says that gives a run the budget if it is the first, and any other 2 s, whatever the budget.

    So a busy machine, where everything before takes longer, uses up no budget. deaf: it looks at no signal, so that it
    would be in vain to wait for its answer.
    """
    if deaf:
        monkeypatch.setattr(pool, "GRACE", 0.5)
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(deadlines, "MINIMUM", 2.0 if budget > FIRST_S else budget)
    monkeypatch.setattr(deadlines, "SHARE", 0.0)
    result = CliRunner().invoke(app, [*map(str, arguments), "--budget", str(budget)])
    return result.exit_code, " ".join(result.output.split())


def test_a_first_run_that_hangs_is_reported_with_its_line(monkeypatch):
    code, text = run_command(monkeypatch, "diagnose", "endless_kernels:first", budget=FIRST_S)
    assert code == 1 and text.startswith("FAIL sleeps does not end (no_end, score 1.00)")
    message = r"run 'values' of probe values did not end within [\d.]+ s \(case given, seed 0\), in sleeps \("
    assert re.search(message, text)
    assert "endless_kernels.py, line 22)" in text and "Try: look for a loop or a barrier" in text


@pytest.mark.parametrize("name", ["loop", "deaf"])
def test_findings_before_a_hung_run_are_kept(name, monkeypatch):
    code, text = run_command(monkeypatch, "diagnose", f"endless_kernels:{name}", budget=600, deaf=name == "deaf")
    assert code == 1 and "did not end within" in text and "in wrong_then_" in text
    assert text.startswith("FAIL y is wrong") and "Also, run '" in text  # its process was ended, not its judge's


@pytest.mark.parametrize("name", ["first", "loop", "deaf"])
def test_a_replay_of_a_run_that_hangs_is_stopped(name, monkeypatch, tmp_path):
    kept = assay.diagnose(endless_kernels.target(lambda x: x * 3), probes="values", out=tmp_path).bundle
    budget, deaf = FIRST_S if name == "first" else 600, name == "deaf"
    code, text = run_command(monkeypatch, "replay", kept, f"endless_kernels:{name}", budget=budget, deaf=deaf)
    assert code == 1 and "did not end within" in text and "endless_kernels.py, line" in text
    if name != "deaf":
        assert text.startswith("not finished: the verdict was fail; here run '")
    if name != "first":
        assert "y exceeds its rounding bound" in text


def test_the_time_limit_of_each_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    patience = RunDeadline(60.0)
    assert patience.until() is None
    patience.begin("a")
    assert patience.until() == 160.0  # the first of a case: the rest of the budget
    now[0] = 101.0
    patience.end()
    assert patience.until() is None
    patience.begin("a")
    assert patience.until() == 121.0  # another of the same: a third of the budget
    now[0] = 110.0
    patience.end()
    patience.begin("a")
    assert patience.until() == 146.0  # four times the longest
    patience.end()
    now[0] = 155.0
    patience.begin("b")
    assert patience.until() == 155.0 + 36.0  # no kernel is accused because the budget is nearly over
    assert RunDeadline(None).until() is None


def test_without_a_budget_a_run_has_no_limit():
    patience = RunDeadline(None)
    patience.begin("a")
    assert patience.until() is None


def test_the_clock_of_a_run_stops_during_a_nested_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    patience = RunDeadline(60.0)
    patience.begin("a")
    now[0] = 103.0
    patience.begin("b")
    now[0] = 110.0
    patience.end()
    assert patience.until() == 107.0 + 53.0 and patience.longest == 7.0  # the outer one, of which 3 s are over
    now[0] = 112.0
    patience.end()
    assert patience.until() is None and patience.longest == 7.0 and patience.seen == {"a", "b"}


def test_a_backward_that_hangs_after_a_nested_call_is_stopped_and_named(monkeypatch):
    code, text = run_command(monkeypatch, "diagnose", "endless_kernels:backward", budget=600, deaf=True)
    assert code == 1 and "run 'interleaved' of probe second_call did not end within" in text
    assert "in backward (" in text and "endless_kernels.py, line" in text


@pytest.mark.parametrize("command", ["diagnose", "replay"])
def test_an_import_that_hangs_is_stopped_and_explained(command, monkeypatch, tmp_path):
    kept = assay.diagnose(endless_kernels.target(lambda x: x * 3), probes="values", out=tmp_path).bundle
    arguments = [kept, "never_imported:x"] if command == "replay" else ["never_imported:x"]
    code, text = run_command(monkeypatch, command, *arguments, budget=1, deaf=True)
    assert code == 2 and text.startswith("Importing never_imported:x did not finish within 1 s, in <module> (")
    assert re.search("never_imported.py, line [56]\\)", text) and text.endswith("give a larger --budget.")


def test_the_time_of_an_import_does_not_count_for_the_first_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    patience = RunDeadline(60)
    patience.begin_import()
    assert patience.until() == 160
    now[0] = 150.0
    patience.end()
    assert patience.until() is None and patience.longest == 0
    patience.begin("a")
    assert patience.until() == 210
