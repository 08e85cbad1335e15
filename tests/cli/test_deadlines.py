"""`goldsmith diagnose` of kernels that do not end: which run it was, what was found before, and when it is given up."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import endless_kernels
from goldsmith import assay
from goldsmith.assay.gate.isolation.candidate_process import CandidateEnded
from goldsmith.cli import app, placement, user_targets
from goldsmith.cli.diagnose import command, deadlines
from goldsmith.cli.diagnose.deadlines import RunDeadline
from goldsmith.cli.workers import candidates, pool
from goldsmith.cli.workers.pool import Died

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


OWN = """
from goldsmith import assay

{imported}
def golden(x):
    {golden}
    return x * 2

def double(x):
    {call}
    return x + x

@assay.case(T=[3, 4])
def cases(make, T):
    {drawn}
    return {{"x": make.normal(T)}}

target = assay.Target(double, golden, cases=cases)
"""
USUAL = {"imported": "", "golden": "pass", "call": "pass", "drawn": "pass"}
# Neither takes time of the processor; the second looks at no signal.
LOOP = "__import__('time').sleep(600)"
DEAF = "import ctypes; mutex, lock = bytes(64), ctypes.pythonapi.pthread_mutex_lock; lock(mutex); lock(mutex)"


def own_file(folder, **lines):
    (folder / "own.py").write_text(OWN.format(**{**USUAL, **lines}))


@pytest.mark.parametrize("command", ["verify", "diagnose"])
@pytest.mark.parametrize(
    "lines, text",
    [
        ({"imported": LOOP}, "its import had not ended after 4 s, in <module> ("),
        ({"golden": DEAF}, "a call of its golden had not ended after 4 s, in golden ("),
        ({"drawn": LOOP}, "its import had not ended after 4 s, in cases ("),  # the declaration draws a case
        ({"drawn": f"if (T, make.dtype.itemsize) == (3, 2): {LOOP}"}, "the inputs of its case cases[T=3] had not"),
    ],
)
def test_a_file_that_does_not_end_beside_the_judge_is_a_sentence_and_status_2(
    command, lines, text, monkeypatch, tmp_path
):
    own_file(tmp_path, **lines)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [command, "own.py:target", "--limit", "4", "--dtype", "bfloat16"])
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and text in output and "own.py" in output
    assert "If it is only slow, give a larger --limit." in output


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["verify", "own.py", "--limit", "inf"], "Invalid value for '--limit'"),
        (["diagnose", "own.py", "--budget", "inf"], "Invalid value for '--budget'"),
        (["verify", "own.py", "--html", "a", "--json", "./a"], "two outputs would be written to a"),
        (["diagnose", "own.py", "--html", "a", "--json", "a"], "two outputs would be written to a"),
    ],
)
def test_what_no_run_can_mean_is_said_before_it(arguments, text, monkeypatch, tmp_path):
    own_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and text in " ".join(result.output.split()), result.output


def test_diagnose_has_the_limit_of_verify(monkeypatch, tmp_path):
    own_file(tmp_path, call=LOOP)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["diagnose", "own.py:target", "--limit", "2", "--budget", "100"])
    output = " ".join(result.output.split())
    assert result.exit_code == 1 and output.removeprefix("Loading torch ").startswith("FAIL own.py:target does not end")
    assert "because a call had not ended after 2 s, in double (own.py, line 10)" in output
    assert "if it is only slow, give a larger --limit" in output


@pytest.mark.parametrize(
    "call, advice",
    [
        ("import os; os._exit(0)", "look for what ends the process: os._exit"),
        ("import ctypes; ctypes.string_at(0)", "under valgrind or gdb"),
        ("raise SystemExit", "look for what raises it"),
    ],
)
def test_the_advice_follows_from_how_the_process_ended(call, advice, monkeypatch, tmp_path):
    own_file(tmp_path, call=call)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["diagnose", "own.py:target", "--device", "cpu"])
    output = " ".join(result.output.split())
    assert result.exit_code == 1 and "ends its process" in output
    assert advice in output and "compute-sanitizer" not in output


def test_the_advice_after_a_signal_on_a_gpu_is_its_own_tool(monkeypatch):
    monkeypatch.setattr(placement, "device_of", lambda request: "cuda:0")
    request = command.DiagnoseRequest("diagnose", "own.py:target")
    assert "compute-sanitizer" in command._advice(request, Died("by signal 11 (SIGSEGV)", "", signal=11))
    assert "os._exit" in command._advice(request, Died("with status 0", ""))


def test_a_kernel_that_fills_the_memory_is_shown_with_its_line(monkeypatch, tmp_path):
    own_file(tmp_path, call="kept = []; [kept.append(x.new_ones(1 << 20)) for _ in iter(int, 1)]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates, "_free_memory", lambda: 1 << 28)
    (target,) = user_targets.load_targets("own.py:target")
    with pytest.raises(CandidateEnded) as ended:
        assay.check(candidates.in_its_own_process(target, "own.py:target", None, "cpu", 60.0))
    assert "it may use 256 (in " in str(ended.value) and "(own.py, line 10))" in str(ended.value)


def test_a_kernel_that_asks_for_too_much_memory_is_shown_with_its_line(tmp_path, monkeypatch):
    own_file(tmp_path, call="x.new_ones(1 << 60)")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["verify", "own.py:target", "--device", "cpu", "--verbose"])
    assert "own.py:10)" in " ".join(result.output.split())
