"""`goldsmith gate --json FILE` goes on where an earlier run ended, and judges anew what has changed since."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import goldsmith
from goldsmith.assay.gate.verdict import Verdict
from goldsmith.cli.gate import command, verdict_output
from goldsmith.cli.gate.command import GateRequest

from .test_gate import PROBLEM, RIGHT, folder, gate, words  # noqa: F401

SOURCE = Path(goldsmith.__file__).resolve().parents[1]
OPTIONS = ("--problem", "softmax.py", "--probes", "quick", "--seed", "1", "--seconds", "2", "--jobs", "1")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows(path)]


def test_a_killed_batch_goes_on_and_ends_like_an_unbroken_one(folder):  # noqa: F811
    (folder / "made/before.py").write_text(RIGHT.replace(" * w", ""))
    (folder / "made/slow.py").write_text("import time\n\ndef candidate(x, w):\n    time.sleep(600)\n")
    out = folder / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "goldsmith", "gate", "made", *OPTIONS, "--json", "out.jsonl"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until and (not out.exists() or out.read_text().count("\n") < 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows(out)
    with out.open("a") as file:
        file.write('{"status": "acc')  # as a kill in the middle of a write leaves it
    result = gate("made", *OPTIONS, "--json", "out.jsonl")
    assert "2 verdicts kept from out.jsonl" in words(result.stdout), result.output
    assert [row["candidate"] for row in before] == ["before", "right"] and rows(out)[:2] == before
    assert rows(out)[2]["status"] == "timed_out"
    again = gate("made", *OPTIONS, "--json", "whole.jsonl")
    assert without_times(out) == without_times(folder / "whole.jsonl")
    assert again.exit_code == result.exit_code == 1


@pytest.fixture
def judged(monkeypatch):
    """The names of the candidates that were given to a judge. It finishes the last one first."""
    names = []

    class Judges:
        isolation = ""

        def __init__(self, *arguments): ...

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def run(self, pairs):
            for number, (_, candidate) in reversed(list(enumerate(pairs))):
                names.append(candidate.name)
                if "raise KeyboardInterrupt" in candidate.source:
                    raise KeyboardInterrupt
                refused = "import missing" in candidate.source
                yield number, Verdict("refused" if refused else "accepted", candidate=candidate.name)

    monkeypatch.setattr(command, "Judges", Judges)

    def run(**request):
        del names[:]
        command.run(GateRequest((Path("made"),), **{"problem": "softmax.py", **request}), json_to="out.jsonl")
        return names

    return run


def test_what_has_changed_is_judged_anew(folder, judged, monkeypatch):  # noqa: F811
    (folder / "made/other.py").write_text(RIGHT)
    assert judged() == ["right", "other"] and judged() == []
    assert [row["candidate"] for row in rows(folder / "out.jsonl")] == ["other", "right"]
    (folder / "made/other.py").write_text(RIGHT + "\n")
    assert judged() == ["other"]
    (folder / "softmax.py").write_text(PROBLEM + "\n")
    assert len(judged()) == 2
    (folder / "neighbour.py").write_text("")  # a problem may import it
    assert len(judged()) == 2
    monkeypatch.setattr(verdict_output, "digest", lambda: "another version")
    assert len(judged()) == 2 and judged() == []
    assert len(judged(seed=5)) == len(judged(probes="quick")) == len(judged(resume=False)) == 2
    (folder / "made/other.py").write_text("import missing\n")
    assert judged() == ["other"] and judged() == ["other"]  # the package may be there now


def test_ctrl_c_loses_no_finished_verdict(folder, judged):  # noqa: F811
    (folder / "made/before.py").write_text("raise KeyboardInterrupt\n")
    assert judged() == ["right", "before"]
    assert [row["candidate"] for row in rows(folder / "out.jsonl")] == ["right"]
    (folder / "made/before.py").write_text(RIGHT)
    assert judged() == ["before"]
    assert [row["candidate"] for row in rows(folder / "out.jsonl")] == ["before", "right"]


@pytest.mark.parametrize(
    "resume, sentence",
    [(True, "The same command judges only the rest."), (False, "Without --resume never, the same command keeps")],
)
def test_ctrl_c_says_what_the_same_command_does_then(resume, sentence, folder, judged, capsys):  # noqa: F811
    (folder / "made/before.py").write_text("raise KeyboardInterrupt\n")
    judged(resume=resume)
    assert f"have no verdict. {sentence}" in words(capsys.readouterr().err)


@pytest.mark.parametrize(
    "option, name, text",
    [
        ("--json", "sources.jsonl", "would replace what is judged"),
        ("--html", "made/right.py", "would replace what is judged"),
        ("--html", "softmax.py", "would replace what is judged"),
        ("--json", "notes.txt", "line 1 is not a verdict, and would be lost"),
        ("--json", "cut.txt", "line 1 is not a verdict, and would be lost"),
    ],
)
def test_no_output_replaces_another_file(option, name, text, folder):  # noqa: F811
    (folder / "sources.jsonl").write_text(json.dumps({"name": "a", "source": RIGHT}) + "\n")
    (folder / "notes.txt").write_text("my notes\n")
    (folder / "cut.txt").write_text("my notes")
    before = (folder / name).read_bytes()
    result = gate("made", "sources.jsonl", *OPTIONS, option, name)
    assert result.exit_code == 2 and text in words(result.output), result.output
    assert (folder / name).read_bytes() == before
