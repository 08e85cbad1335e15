"""How `goldsmith generate` ends where its reader goes, and where Ctrl-C comes before there is anything to lose."""

import importlib
import os
import subprocess
import sys

import pytest
import typer.main

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from typer.testing import CliRunner

import goldsmith.cli
from cli.finetune_tools import saved_model
from goldsmith.cli.generate import options
from offload.test_device import Simulation
from repo.tree import ROOT

pytestmark = pytest.mark.sweep(5)


@pytest.mark.parametrize("words", [["--stats"], ["--json", "--budget", "0"]], ids=" ".join)
def test_a_closed_pipe_is_not_an_error(words, tmp_path_factory):
    reading, writing = os.pipe()
    os.close(reading)
    command = ["generate", ROOT / "examples" / "shakespeare-moe", "--prompt", "x", "--max-new-tokens", "2", *words]
    env = os.environ | {"GOLDSMITH_CACHE": str(tmp_path_factory.getbasetemp() / "ends-cache")}
    done = subprocess.run(
        [sys.executable, "-m", "goldsmith.cli", *command, "--device", "cpu"],
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
def test_ctrl_c_before_a_command_runs_exits_silently_with_130(where, name, call, monkeypatch, capsys):
    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 130 and ended.value.__suppress_context__ and capsys.readouterr() == ("", "")


def test_an_error_under_way_at_ctrl_c_is_reported(monkeypatch, tmp_path):
    """A GPU's last call had a NaN that nobody has been told of: a paragraph, and still the status of Ctrl-C."""

    class Kept(Simulation):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            kept.append(self)

    def stopped(*_, **__):
        (engine,) = kept
        x = torch.full((1, engine.store.hidden_size), torch.nan)
        engine(0, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        raise KeyboardInterrupt

    kept = []
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("goldsmith.hf.offload.generation.generate", stopped)
    monkeypatch.setattr(importlib.import_module("goldsmith.hf.offload.attachment"), "Engine", Kept)
    folder = saved_model(tmp_path / "model")
    words = ["--prompt", "x", "--device", "cpu", "--budget", "24MiB", "--stats"]
    done = CliRunner().invoke(goldsmith.cli.app, ["generate", str(folder), *words])
    assert done.exit_code == 130 and "NaN in layer 0, stage 'input'" in done.stderr
    assert "time to first token" not in done.stderr and "limiting lane" in done.stderr and kept[0].closed
