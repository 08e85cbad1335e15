"""`goldsmith gate`: what it reads, prints and returns."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import goldsmith
from goldsmith.assay.gate import verdict_page
from goldsmith.assay.gate.verdict import Verdict
from goldsmith.cli import app
from goldsmith.cli.gate import display, verdict_output
from goldsmith.cli.terminal import console

pytestmark = pytest.mark.sweep(3)
SOURCE = Path(goldsmith.__file__).resolve().parents[1]
PROBLEM = """
import torch
from goldsmith import assay

def golden(x, w):
    return torch.softmax(x, -1) * w

@assay.case(T=[1, 5], D=[12])
def cases(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}
"""
RIGHT = """
import torch

def candidate(x, w):
    e = (x - x.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True) * w
"""
MADE = {
    "right.py": RIGHT,
    "wrong.py": RIGHT.replace(" * w", ""),
    "broken.py": "def candidate(",
    "leaves.py": "import os\n\ndef candidate(x, w):\n    os._exit(0)\n",
    "loops.py": "def candidate(x, w):\n    while True:\n        pass\n",
    "needs.py": "import a_package_that_is_missing\n",
    "judge.py": "import goldsmith.assay.gate\n\ndef candidate(x, w):\n    return x\n",
    "hog.py": "import torch\n\ndef candidate(x, w):\n    return torch.zeros(100 << 30)\n",
}
STATUSES = {
    "right": "accepted", "wrong": "wrong", "broken": "refused", "leaves": "crashed", "loops": "timed_out",
    "needs": "refused", "judge": "refused", "hog": "over_memory",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "softmax.py").write_text(PROBLEM)
    (tmp_path / "made").mkdir()
    (tmp_path / "made/right.py").write_text(RIGHT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gate(*arguments):
    return CliRunner().invoke(app, ["gate", *map(str, arguments)])


def words(text):
    return " ".join(text.split())


def test_every_candidate_gets_a_verdict_and_a_line_of_json(folder):
    for name, source in MADE.items():
        (folder / "made" / name).write_text(source)
    limits = ("--seconds", "5", "--probes", "quick", "--seed", "1")
    result = gate("made", "--problem", "softmax.py", "--json", "out.jsonl", "--html", "out.html", *limits)
    assert result.exit_code == 1, result.output
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["candidate"] for row in rows] == sorted(STATUSES)
    assert {row["candidate"]: row["status"] for row in rows} == STATUSES
    assert all(row["seed"] == 1 for row in rows)
    assert "Traceback" not in result.output
    assert "it needs a package that is not installed here: No module named 'a_package_that_is_missing'" in words(
        result.stdout
    )
    assert "1 of 8 candidates accepted: 1 wrong, 1 crashed, 1 timed_out, 1 over_memory, 3 refused" in words(
        result.stdout
    )
    page = (folder / "out.html").read_text()
    assert "1 of 8 candidates accepted" in page and "a call had not ended after 5 s" in page


def test_json_alone_is_on_stdout_and_all_accepted_is_status_0(folder):
    result = gate("made/right.py", "--problem", "softmax.py", "--json", "-", "--probes", "quick")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "accepted"
    assert "1 of 1 candidate accepted" in words(result.stderr)


def test_a_reader_that_has_gone_is_a_sentence_and_status_2(folder, monkeypatch):
    def closed(text):
        raise BrokenPipeError

    monkeypatch.setattr(verdict_output, "write_stdout", closed)
    (folder / "made/broken.py").write_text("def candidate(")
    result = gate("made/broken.py", "made/broken.py", "--problem", "softmax.py", "--json", "-", "--jobs", 1)
    assert result.exit_code == 2 and "The reader of --json - has gone: 1 candidate not judged." in words(result.stderr)


def test_a_file_may_hold_both_golden_and_candidate(folder):
    (folder / "both.py").write_text(PROBLEM + RIGHT)
    assert gate("both.py", "--probes", "quick").exit_code == 0


def test_candidates_name_their_problem_in_a_folder(folder):
    (folder / "problems").mkdir()
    (folder / "problems/softmax.py").write_text(PROBLEM)
    (folder / "problems/double.py").write_text(PROBLEM.replace("torch.softmax(x, -1)", "2 * x"))
    (folder / "made/double.py").write_text('PROBLEM = "double"\n\ndef candidate(x, w):\n    return (x + x) * w\n')
    (folder / "made/right.py").write_text(f'PROBLEM = "softmax"\n{RIGHT}')
    (folder / "made/other.py").write_text(f'PROBLEM = "nothing"\n{RIGHT}')
    result = gate("made", "--problem", "problems", "--jobs", 1, "--probes", "quick", "--json", "-")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["candidate"], row["status"], row["reason"]) for row in rows] == [
        ("double", "accepted", ""), ("other", "refused", "unknown_problem"), ("right", "accepted", ""),
    ]  # fmt: skip


def test_a_golden_at_fault_is_status_2_with_a_sentence(folder):
    (folder / "problems").mkdir()
    (folder / "problems/softmax.py").write_text(PROBLEM)
    (folder / "problems/writes.py").write_text(PROBLEM.replace("(x, -1)", "(x.float(), -1)"))
    (folder / "made/right.py").write_text(f'PROBLEM = "softmax"\n{RIGHT}')
    (folder / "made/writes.py").write_text(f'PROBLEM = "writes"\n{RIGHT}')
    command = ("--problem", "problems", "--jobs", 1, "--probes", "quick")
    result = gate("made", *command)
    sentence = (
        "Exit status 2: 1 candidate could not be judged, for a reason that is not the candidate's (reference_fault)."
    )
    assert result.exit_code == 2 and sentence in words(result.stderr), result.output
    alone = gate("made/writes.py", *command)
    assert alone.exit_code == 2 and "The golden is at fault: the golden computes in float32" in words(alone.stderr)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["nowhere.py", "--problem", "softmax.py"], "nowhere.py: there is no such file or folder."),
        (["made", "--problem", "none.py"], "none.py: there is no such file"),
        (["made", "--problem", "empty.py"], "empty.py: the problem has no cases"),
        (["made", "--problem", "softmax.py", "--device", "tpu"], "--device tpu: not a device"),
        (["made", "--problem", "softmax.py", "--html", "softmax.py/x.html"], "cannot write softmax.py/x.html"),
        (["made", "--problem", "softmax.py", "--html", "no/x"], "cannot write no/x: there is no folder no."),
        (["made", "--problem", "softmax.py", "--json", "no/x"], "cannot write no/x: there is no folder no."),
        (["no.jsonl", "--problem", "softmax.py"], "no.jsonl: the file holds no candidates"),
        (["pipe.py", "--problem", "softmax.py"], "pipe.py: no ordinary file"),
        (["made/right.py", "--problem", "folder"], "folder: the folder holds no problems"),
        (["made/right.py", "--problem", "raises.py"], "the golden raised RuntimeError: no (raises.py:6)"),
        (["made/right.py", "--problem", "interrupts.py"], "it raised KeyboardInterrupt (interrupts.py:6)"),
        (
            ["made/right.py", "--problem", "interrupted.py"],
            "interrupted.py: importing it raised RuntimeError: it raised",
        ),
        (["made/right.py", "--problem", "softmax.py", "--seed", 1 << 70], "seed: expected a number of at most 62 bits"),
        (["made", "--problem", "softmax.py", "--json", "v", "--html", "v"], "two outputs would be written to v"),
        (["made", "--problem", "softmax.py", "--memory", "inf"], "Invalid value for '--memory'"),
        (["made", "--problem", "softmax.py", "--problem-seconds", "inf"], "Invalid value for '--problem-seconds'"),
        (["made", "--problem", "softmax.py", "--seconds", "nan"], "expected a number from 0.01 to 10000000, got nan"),
        (["made", "--problem", "softmax.py", "--problem", "empty.py"], "'--problem': it was given twice"),
        (["made/right.py", "--problem", "no_elements.py"], "no result has an element, so nothing was compared"),
        (["made/right.py", "--problem", "binary.py"], "binary.py does not parse: source code string cannot"),
    ],
)
def test_what_cannot_run_is_one_paragraph_and_status_2(folder, arguments, text):
    (folder / "empty.py").write_text("def golden(x):\n    return x\n\ncases = []\n")
    (folder / "no.jsonl").touch()
    raising = PROBLEM.replace("return torch.softmax", "raise RuntimeError('no'); torch.softmax")
    (folder / "raises.py").write_text(raising)
    (folder / "interrupts.py").write_text(raising.replace("RuntimeError('no')", "KeyboardInterrupt"))
    (folder / "interrupted.py").write_text("raise KeyboardInterrupt")
    (folder / "folder").mkdir()
    (folder / "no_elements.py").write_text(PROBLEM.replace("T=[1, 5]", "T=[0]") + "\nbackward = None\n")
    (folder / "binary.py").write_bytes(b"\xff\0")
    os.mkfifo(folder / "pipe.py")
    result = gate(*arguments)
    assert not (folder / "no").exists()
    assert result.exit_code == 2 and text in words(result.stderr.replace("\u2502", "")), result.output
    assert result.stdout == "" and "Traceback" not in result.output


def test_times_are_shown_for_what_is_accepted(folder):
    result = gate("made/right.py", "--problem", "softmax.py", "--bench", "--probes", "quick")
    assert result.exit_code == 0
    assert re.search(r"right +[\d.]+ [um]s +[\d.]+ [um]s to [\d.]+ [um]s .* [\d.]+x", result.stdout), result.stdout


def test_ctrl_c_keeps_the_verdicts_that_are_there_and_no_process_imports_from_the_current_folder(folder):
    for name in ("secrets", "torch", "queue"):
        (folder / f"{name}.py").write_text("open('imported', 'a').write(f'{__name__} ')\nraise ImportError\n")
    (folder / "made/slow.py").write_text("import time\n\ndef candidate(x, w):\n    time.sleep(60)\n    return x\n")
    command = [sys.executable, "-m", "goldsmith", "gate", "made", "--problem", "softmax.py", "--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [*command, "--probes", "quick", "--json", "out.jsonl"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until and not (folder / "out.jsonl").exists() or not (folder / "out.jsonl").read_text():
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "Interrupted: 1 candidate has no verdict." in err and "1 of 2 candidates accepted" in out
    assert not (folder / "imported").exists()


@pytest.mark.parametrize("columns", [60, 80])
def test_a_terminal_shows_a_bar_that_fits_and_no_line_is_longer(folder, columns):
    (folder / "made/wrong.py").write_text(MADE["wrong.py"])
    command = [
        sys.executable,
        "-m",
        "goldsmith",
        "gate",
        "made",
        "--problem",
        "softmax.py",
        "--jobs",
        "1",
        "--probes",
        "quick",
        "--bench",
    ]
    main, side = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdin=side, stdout=side, stderr=side, cwd=folder)
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert process.wait(60) == 1
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [part.rstrip() for line in text.split("\n") for part in line.split("\r")]
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    assert any(re.match(r"[12]/2 ", line) for line in lines), text
    assert "1 of 2 candidates accepted" in words(text)


def test_a_page_and_a_table_of_many_verdicts():
    verdicts = [Verdict("wrong", "values", f"kernel_{n}", evidence=["y <is> wrong", "more"]) for n in range(50)]
    verdicts.insert(
        0,
        Verdict("wrong", "values", "forged\n9 of 9 candidates accepted", evidence=["a\n9 of 9", "x " + "9 of 9 " * 40]),
    )
    timing = {"time": 12.0, "p10": 11.0, "p90": 14.0, "reference": 24.0, "speedup": 2.0, "floor": 1.0, "doubts": []}
    verdicts += [Verdict("accepted", candidate="good", timing={"case": "c", **timing})]
    doubted = {**timing, "p10": None, "p90": None, "time": 13.0, "doubts": ["another clock counts"]}
    verdicts += [Verdict("accepted", candidate="doubted", timing={"case": "c", **doubted})]
    page = verdict_page.page(verdicts, conditions=["a machine"])
    assert "49</code>" in page and "y &lt;is&gt; wrong" in page and "a machine" in page and "2 of 53" in page
    assert display.counts(Counter(v.status for v in verdicts)) == "2 accepted, 51 wrong"
    out = console()
    with out.capture() as captured:
        display.show(out, verdicts[:1], every=True)
    assert not re.search("^(  )?(9|of) ", captured.get(), re.M)
    with out.capture() as captured:
        display.show(out, verdicts, every=False)
    assert not re.search("^(  )?9 of 9", captured.get(), re.M)
    assert re.search(r"doubted +13 us +- +24 us", captured.get())
    assert "and 11 further candidates: --verbose shows them" in captured.get() and "2.00x" in captured.get()


def test_an_option_of_a_format_that_no_problem_has_is_refused(folder):
    for option, value, text in (
        ("--dtype", "bfloat16", "--dtype is for problems of KernelBench"), ("--dtype", "float7", "float7: not a dtype"),
        ("--sizes", "declared", "--sizes is for problems of KernelBench"),
        ("--elements", "9", "--elements is for problems of KernelBench"),
        ("--workloads", "w.jsonl", "--workloads is for problems of FlashInfer-Bench"),
    ):  # fmt: skip
        result = gate("made", "--problem", "softmax.py", option, value)
        assert result.exit_code == 2 and text in " ".join(result.stderr.split())


def test_a_wrong_candidate_is_diagnosed_if_asked(folder):
    (folder / "made/right.py").rename(folder / "made/wrong.py")
    (folder / "made/wrong.py").write_text(RIGHT.replace(" * w", ""))
    result = gate("made", "--problem", "softmax.py", "--diagnose", "--json", "-", "--seed", "3")
    assert result.exit_code == 1
    (verdict,) = map(json.loads, result.stdout.splitlines())
    assert verdict["status"] == "wrong" and verdict["diagnosis"].startswith("y is wrong")
    assert "diagnosis y is wrong" in " ".join(result.stderr.split())
