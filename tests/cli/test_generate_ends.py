"""How `goldsmith generate` ends where its reader goes, and where Ctrl-C comes before there is anything to lose."""

import os
import subprocess
import sys

import pytest
import typer.main

pytest.importorskip("transformers", reason="comes with the extra hf")

import goldsmith.cli
from goldsmith.cli.generate import options
from repo.tree import ROOT


@pytest.mark.parametrize("words", [["--stats"], ["--json", "--budget", "0"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_fault_of_the_program(words, tmp_path_factory):
    reading, writing = os.pipe()
    os.close(reading)
    asked = ["generate", ROOT / "examples" / "shakespeare-moe", "--prompt", "x", "--max-new-tokens", "2", *words]
    env = os.environ | {"GOLDSMITH_CACHE": str(tmp_path_factory.getbasetemp() / "ends-cache")}
    done = subprocess.run(
        [sys.executable, "-m", "goldsmith.cli", *asked, "--device", "cpu"],
        stdout=writing, stderr=subprocess.PIPE, text=True, env=env, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 0 and "rror" not in done.stderr, done.stderr
    assert ("time to first token" in done.stderr) == ("--stats" in words)


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where, name, call",
    [(options, "register", lambda: goldsmith.cli.__getattr__("app")), (typer.main, "get_command", goldsmith.cli.app)],
    ids=["while modules are imported", "while commands are put together"],
)
def test_ctrl_c_before_a_command_runs_is_130_without_a_word(where, name, call, monkeypatch, capsys):
    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 130 and ended.value.__suppress_context__ and capsys.readouterr() == ("", "")
