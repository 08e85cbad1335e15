"""`goldsmith diagnose` and `goldsmith replay` as a user runs them: story, files, bundles, crashes, Ctrl-C, status."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import goldsmith
from goldsmith.assay.report.results import Finding
from goldsmith.cli import app
from goldsmith.cli.diagnose import command, worker_tasks
from goldsmith.cli.user_targets import one_target
from goldsmith.cli.workers.pool import Pool

pytestmark = pytest.mark.sweep(5)

HERE = Path(__file__).resolve().parent
SOURCE = Path(goldsmith.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _from_the_folder_of_the_kernels(monkeypatch):
    monkeypatch.chdir(HERE)


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def words(text):
    return " ".join(text.split())


def ask(**more):
    """What a worker answers, without a process of its own."""
    request = {
        "do": "diagnose", "name": "own_kernels:wrong", "backend": None, "case": None, "dtype": None, "device": "cpu",
        "interpret": True, "budget": 60.0, "seed": 0, "out": None, "bundle": None, "html": None, "json": True,
        "patch": False, "apply": None, "propose": None, "limit": None,
    }  # fmt: skip
    reports = []
    reply = getattr(worker_tasks, more.get("do", "diagnose"))(request | more, reports.append)
    return reply, reports


def test_a_wrong_kernel_is_explained_kept_and_replayed(tmp_path):
    page, results = tmp_path / "page.html", tmp_path / "results.json"
    result = run("diagnose", "own_kernels:wrong", "--out", tmp_path / "kept", "--html", page, "--json", results)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("FAIL  scaled is wrong: ")
    assert max(map(len, result.stdout.partition("Bundle")[0].splitlines())) <= 80
    (bundle,) = (tmp_path / "kept").iterdir()
    assert f"goldsmith diagnose own_kernels:wrong --replay {bundle}" in words(result.stdout)
    for written in (page, bundle / worker_tasks.PAGE):
        text = written.read_text().replace("<wbr>", "")
        assert "<h1>scaled is wrong: " in text and "own_kernels:wrong --replay" in text
    data = json.loads(results.read_text())
    assert (data["verdict"], data["first_wrong_stage"]) == ("fail", "scaled")
    again, _ = ask(do="replay", bundle=str(bundle))
    assert (again["verdict"], again["answer"]) == ("fail", "reproduced")
    assert again["text"].startswith("reproduced: the verdict was fail, here it is fail")
    assert again["text"].count("reproduced") == 1 and "report.text" not in again["text"]
    assert [note["id"] for note in again["json"]["notes"]].count("replay") == 1


def test_a_patch_is_shown_and_applied_to_a_copy(tmp_path):
    copy = tmp_path / "copy.py"
    result = run("diagnose", "own_kernels:wrong", "--apply", copy)
    assert result.exit_code == 1, result.output
    assert "this edit makes the kernel pass: 2 cases, all probes" in words(result.stdout)
    assert '+    return assay.stage("scaled", x * k * 1) + 1' in result.stdout
    own = HERE / "own_kernels.py"
    assert copy.read_text() == own.read_text().replace(", x * k * 1.5)", ", x * k * 1)")
    before = own.read_text()
    refused, _ = ask(patch=True, apply=str(own))
    assert "is the candidate's own file, which is never written" in refused["lost"][0] and own.read_text() == before
    without = run("diagnose", "own_kernels:wrong", "--no-patch", "--apply", tmp_path / "none.py")
    assert "Patch" not in without.stdout and "there is no patch" in words(without.output)


def test_a_bundle_is_diagnosed_as_one_case(tmp_path):
    first, _ = ask(out=str(tmp_path))
    (bundle,) = tmp_path.iterdir()
    reply, _ = ask(bundle=str(bundle))
    assert reply["verdict"] == "fail" and reply["json"]["examined"]["name"] == first["json"]["case"]["name"]
    right, _ = ask(bundle=str(bundle), name="own_kernels:target")
    assert right["verdict"] == "pass"
    reply, _ = ask(do="replay", bundle=str(bundle), name="own_kernels:target")
    assert (reply["verdict"], reply["answer"]) == ("pass", "not reproduced")


def test_no_module_that_a_bundle_names_is_imported(tmp_path):
    ask(out=str(tmp_path))
    (bundle,) = tmp_path.iterdir()
    reply, _ = ask(do="replay", bundle=str(bundle), name="")
    assert "'off', which is not an operator of goldsmith" in reply["problem"]
    reply, _ = ask(do="replay", bundle=str(tmp_path), name="own_kernels:wrong")
    assert reply["problem"] == f"{tmp_path} is not a readable bundle: has no file bundle.json; did you mean {bundle}?"
    other = tmp_path / "other.py"
    target = "assay.Target(lambda q: abs(q), lambda q: abs(q), cases={'q': 1.0}, name='size')"
    other.write_text(f"from goldsmith import assay\ntarget = {target}\n")
    reply, _ = ask(do="replay", bundle=str(bundle), name=f"{other}:target")
    assert reply["problem"].startswith(f"{bundle} does not fit {other}:target: ")
    (bundle / "bundle.json").write_text("{}")
    reply, _ = ask(do="replay", bundle=str(bundle), name="own_kernels:wrong")
    assert "is not a readable bundle: bundle.json: schema None" in reply["problem"]


def test_a_bundle_of_an_operator_names_operator_and_backend():
    class Bundle:
        meta = {"target": "mhc.expand on reference"}

    assert worker_tasks._operator_of(Bundle) == {"name": "mhc.expand", "backend": "reference"}


def test_a_right_kernel_passes_and_every_run_is_reported():
    reply, reports = ask(name="own_kernels:target")
    assert reply["verdict"] == "pass" and reply["text"].startswith("PASS  scaled: nothing wrong was found")
    assert reports[:2] == [{"importing": "own_kernels:target"}, {"over": 0}]
    assert reports[2] == {"case": "rows[T=5]", "probe": "values", "run": "values", "runs": 1, "seed": 0}
    assert reports[3] == {"over": 1}
    begun = [t for t in reports[2:] if "run" in t]
    assert [t["runs"] for t in begun] == [*range(1, len(begun) + 1)] and len(reports) == 2 + 2 * len(begun)
    assert all(t["seed"] == 0 for t in begun) and reports[-1] == {"over": len(begun)}
    assert not (
        worker_tasks.hooks.RUNS or worker_tasks.hooks.ENDED or worker_tasks.hooks.STOPPED or worker_tasks.hooks.RUNNING
    )


def test_an_operator_is_diagnosed_on_the_requested_backend():
    reply, reports = ask(name="mhc.expand", backend="reference")
    assert reply["verdict"] == "pass" and "mhc.expand on reference" in reply["text"] and reports
    assert "many_tokens" not in str(reply), "a large case in a quick search"


def test_a_spent_budget_certifies_nothing():
    reply, reports = ask(name="mhc.expand", backend="reference", budget=0.01)
    assert reply["verdict"] == "unjudged" and "did not run" in words(reply["text"]) and reports


@pytest.mark.parametrize(
    "question, message",
    [
        ({"name": "nosuch"}, "unknown operator 'nosuch'; known: experts.linear"),
        ({"name": "mhc"}, "'mhc' is a family; name one of its operators: mhc.boundary, "),
        ({"name": "mhc.post", "backend": "cuda"}, "unknown backend 'cuda'; mhc.post has: triton, reference"),
        ({"name": "mhc.post", "case": "nosuch"}, "has no case 'nosuch'; there are: "),
        ({"backend": "triton"}, "--backend triton: only operators have backends"),
        ({"name": "own_kernels:nosuch"}, "own_kernels has no 'nosuch'; its targets are: "),
        (
            {"name": "own_kernels:several"},
            "name one target; there are: own_kernels:several#1 (scaled)",
        ),
        ({"name": "own_kernels:several#3"}, "own_kernels:several#2 (prints)"),
        ({"name": "own_kernels:not_a_target"}, "is an object of type int; expected a goldsmith.assay.Target"),
        ({"device": "cuda:99"}, "--device cuda:99: "),
    ],
)
def test_a_wrong_request_is_answered_with_what_exists(question, message):
    assert message in ask(**question)[0]["problem"]


def test_a_target_of_a_list_is_chosen_by_its_number():
    assert one_target("own_kernels:several#2").name == "prints"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["diagnose", "own_kernels:wrong", "--replay", "nosuch"], "nosuch is not a bundle: there is no such folder."),
        (["replay", "nosuch"], "nosuch is not a bundle: there is no such folder."),
        (["diagnose", "no_such_module:target"], "no module 'no_such_module' is in the current directory"),
        (["diagnose", "no_such_module:target", "--out", "/proc/nope/here"], "--out /proc/nope/here cannot be written"),
        (
            ["diagnose", "no_such_module:target", "--out", __file__],
            "diagnose.py cannot be written: it is not a folder",
        ),
        (["diagnose", "no_such_module:target", "--out", f"{__file__}/x"], "cannot be written: Not a directory."),
        (
            ["diagnose", "x", "--replay", "b", "--case", "a"],
            "--case a does not go with --replay: a bundle is one case with its inputs",
        ),
        (["diagnose", "x", "--replay", "b", "--dtype", "float32"], "--dtype float32 does not go with --replay"),
        (["diagnose", "x", "--replay", "b", "--seed", "3"], "--seed 3 does not go with --replay"),
    ],
)
def test_a_request_that_cannot_run_is_one_paragraph_and_status_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in words(result.stderr)
    assert result.stdout == "" and "Traceback" not in result.output


def test_the_output_folder_is_checked_before_the_work_and_not_left_behind(tmp_path):
    result = run("diagnose", "no_such_module:target", "--out", tmp_path / "new" / "kept")
    assert "no module" in words(result.stderr) and not (tmp_path / "new").exists()


def test_a_diagnosis_is_printed_even_if_it_cannot_be_saved(tmp_path):
    (tmp_path / "file").write_text("")
    kept, page = tmp_path / "file" / "kept", tmp_path / "file" / "page.html"
    reply, _ = ask(out=str(kept), html=str(page))
    assert reply["verdict"] == "fail" and reply["text"].startswith("FAIL  scaled is wrong") and reply["pages"] == []
    assert "Bundle" not in reply["text"]
    message = f"Cannot write a bundle into {kept}: Not a directory."
    assert reply["lost"] == [message, f"Cannot write {page}: File exists."]


@pytest.mark.parametrize("verdict, status", [("fail", 1), ("pass", 0)])
def test_files_that_could_not_be_written_are_named_below_the_diagnosis(tmp_path, monkeypatch, verdict, status):
    """The exit status says what the verdict is, whatever became of the files."""
    known = {
        "text": verdict, "verdict": verdict, "pages": [], "json": {}, "interrupted": False,
        "lost": ["Cannot write page.html: No space left on device."],
    }  # fmt: skip
    results = tmp_path / "results.json"

    def filled(request, watcher):
        results.unlink(missing_ok=True)
        results.mkdir()
        return known

    monkeypatch.setattr(command, "_ask_worker", filled)
    result = run("diagnose", "own_kernels:wrong", "--json", results)
    assert (result.exit_code, result.stdout) == (status, f"{verdict}\n")
    assert words(result.stderr) == f"{known['lost'][0]} Cannot write {results}: Is a directory."


def test_an_error_while_a_bundle_is_written_loses_no_diagnosis(tmp_path, monkeypatch):
    def full(path, raw):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    reply, _ = ask(out=str(tmp_path))
    assert reply["verdict"] == "fail"
    assert reply["lost"] == [f"Cannot write a bundle into {tmp_path}: No space left on device."]
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_loses_no_replay(tmp_path):
    ask(out=str(tmp_path / "kept"))
    (bundle,) = (tmp_path / "kept").iterdir()
    reply, _ = ask(do="replay", bundle=str(bundle), html=str(tmp_path))
    assert reply["answer"] == "reproduced" and reply["pages"] == []
    assert reply["lost"] == [f"Cannot write {tmp_path}: Is a directory."]


def test_a_bundle_of_a_bundle_keeps_its_threads(tmp_path):
    ask(out=str(tmp_path / "first"))
    (bundle,) = (tmp_path / "first").iterdir()
    meta = json.loads((bundle / "bundle.json").read_text())
    threads = meta["threads"] + 1
    (bundle / "bundle.json").write_text(json.dumps(meta | {"threads": threads}))
    ask(bundle=str(bundle), out=str(tmp_path / "second"))
    (again,) = (tmp_path / "second").iterdir()
    assert json.loads((again / "bundle.json").read_text())["threads"] == threads


def test_the_text_says_that_its_last_command_runs_only_the_smallest_case(tmp_path):
    reply, _ = ask(name="own_kernels:wrong", case="rows[T=5]", out=str(tmp_path))
    message = "This command examines only the smallest case"
    assert (message in reply["text"]) == ("(smallest; found in" in words(reply["text"])) and message in reply["text"]
    bundle = next(tmp_path.iterdir())
    assert message not in ask(bundle=str(bundle))[0]["text"]


def test_control_characters_in_messages_are_escaped_in_text_and_page(tmp_path):
    page = tmp_path / "page.html"
    reply, _ = ask(name="own_kernels:colourful", html=str(page))
    for text in (reply["text"], page.read_text()):
        assert "\\x1b[31m" in text and not any(c in text for c in "\x1b\x07\r\x9b")
    result = run("diagnose", "own_kernels_colourful:x")
    assert result.exit_code == 2 and "\\x1b[31m" in result.stderr and "\x1b" not in result.stderr


def test_a_candidate_that_ends_its_process_is_a_diagnosis_with_a_page(tmp_path):
    page = tmp_path / "page.html"
    result = run("diagnose", "own_kernels:crashing", "--html", page, "--json", "-")
    assert result.exit_code == 1
    output = words(result.stderr)
    assert "FAIL own_kernels:crashing ends its process" in output
    assert "the process ended by signal 11 (SIGSEGV), in crashes" in output
    assert "in run 'values' of probe values, case rows[T=5]" in output
    assert json.loads(result.stdout)["causes"][0]["id"] == "exception"
    assert "ended by signal 11 (SIGSEGV)" in page.read_text()


def test_a_candidate_that_raises_systemexit_is_blamed_and_not_the_user():
    result = run("diagnose", "own_kernels:interrupting")
    assert result.exit_code == 1
    assert "the candidate raised KeyboardInterrupt" in words(result.stdout)
    request, left = (
        command.DiagnoseRequest("diagnose", "own_kernels:leaving"),
        {"ended": "SystemExit not today", "where": "in f"},
    )
    last = {"case": "rows[T=5]", "probe": "values", "run": "values"}
    assert "the candidate raised SystemExit not today, in f" in command._ended(request, left, last)["text"]
    assert command._ended(request, left, {})["problem"].startswith("Importing own_kernels:leaving raised SystemExit")


def test_the_json_is_written_before_a_reader_can_close_the_pipe(monkeypatch, tmp_path):
    known = {
        "text": "PASS", "lost": [], "verdict": "pass", "pages": [], "json": {"verdict": "pass"}, "interrupted": False
    }  # fmt: skip
    monkeypatch.setattr(command, "_ask_worker", lambda request, watcher: known)

    class Closed:
        is_terminal = False

        def print(self, *arguments, **options):
            raise BrokenPipeError

    monkeypatch.setattr(command, "console", lambda stderr=False: Console(stderr=True) if stderr else Closed())
    with pytest.raises(BrokenPipeError):
        command.run(command.DiagnoseRequest("diagnose", "own_kernels:target"), str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()) == {"verdict": "pass"}


def diagnosing(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "goldsmith.cli", "diagnose", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def test_ctrl_c_prints_partial_results(tmp_path):
    started, results = tmp_path / "started", tmp_path / "results.json"
    os.environ["OWN_KERNELS_STARTED"] = str(started)
    try:
        with diagnosing("own_kernels:slow", "--json", str(results)) as process:
            try:
                while not started.exists() and process.poll() is None:
                    pass
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
    finally:
        del os.environ["OWN_KERNELS_STARTED"]
    assert process.returncode == 1, err
    data = json.loads(results.read_text())
    assert (data["verdict"], data["partial"]) == ("fail", "interrupted")
    assert "y is wrong" in words(out) and "partial: interrupted" in out and "Traceback" not in err


def test_a_run_that_ignores_ctrl_c_is_killed_after_a_while(monkeypatch):
    monkeypatch.setattr("goldsmith.cli.workers.pool.PATIENCE", 0.1)
    pool = Pool(1, forward_ctrl_c=True)
    pool.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        pool._next()
    request = command.DiagnoseRequest("diagnose", "own_kernels:hanging")
    progress = command._RunProgress(Console(stderr=True), request)
    progress.update({"case": "rows[T=5]", "run": "values", "probe": "values", "runs": 1, "seed": 0})
    monkeypatch.setattr(command.Pool, "run", lambda pool, jobs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(command.Interruption, match="values was running and did not stop"):
        command._ask_worker(request, progress)
    finding = Finding("CERTAIN", "values", "y", None, 2.0, 1.0, "y is off", "rows[T=5]")
    progress.findings = [asdict(finding)]
    reply = command._ask_worker(request, progress)
    assert reply["verdict"] == "fail" and "y is off" in reply["text"] and "interrupted" in reply["text"]


@pytest.mark.parametrize("command_line", [["diagnose", "imports_slowly:target"], ["verify", "imports_slowly:target"]])
@pytest.mark.parametrize("moment", ["started", "importing"])
def test_ctrl_c_before_the_first_result_ends_with_130(tmp_path, command_line, moment):
    (tmp_path / "imports_slowly.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "goldsmith.cli", *command_line], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while moment == "importing" and not (tmp_path / moment).exists() and process.poll() is None:
                time.sleep(0.02)
            while moment == "started" and not children(process.pid) and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Interrupted before" in err and "Traceback" not in err


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
