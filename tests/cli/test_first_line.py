"""The commands that import torch and transformers say so first: a user sees a line within a second."""

import gc
import io
import subprocess
import sys

import pytest

import goldsmith
from goldsmith.cli.terminal import loading_torch

SOURCE = goldsmith.__path__[0] + "/.."
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from goldsmith.cli import app; app()"


@pytest.mark.parametrize("command", [["generate", "a/model", "--prompt", "x"], ["finetune", "a/model", "--data", "x"]])
def test_the_first_line_comes_before_any_heavy_import(command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, cwd=SOURCE, timeout=120
    )
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "Loading torch and transformers, then model"


@pytest.mark.parametrize("command", [["verify"], ["diagnose", "x.py"], ["replay", "x"], ["bench"], ["doctor"]])
def test_commands_without_transformers_say_that_they_load_torch(command):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, cwd=SOURCE, timeout=120
    )
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "Loading torch"


@pytest.mark.parametrize(
    "terminal, environment, shown",
    [
        (False, {}, "Loading torch\n"),
        (True, {}, f"Loading torch\r{' ' * 13}\r"),  # a terminal forgets it
        (True, {"WORLD_SIZE": "2", "RANK": "0"}, f"Loading torch\r{' ' * 13}\r"),
        (True, {"WORLD_SIZE": "2", "RANK": "1"}, ""),
    ],
)
def test_a_terminal_forgets_the_first_line_and_only_the_first_rank_shows_it(terminal, environment, shown, monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with loading_torch():
        assert not gc.isenabled()  # it would look for garbage among what is imported
    assert stderr.getvalue() == shown and gc.isenabled()


INTERRUPTED_IMPORT = """
import os, signal, sys, time
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.{name})
                time.sleep(10)
            except KeyboardInterrupt:
                pass  # as some packages do while they are imported
            sys.modules["torch"] = None
sys.meta_path.insert(0, Interrupter())
from goldsmith.cli import app
app()
"""
RUNS = [
    ["verify", "--quick"], ["gate", "x.py"], ["bench"], ["doctor"],
    ["generate", "a/model", "--prompt", "x"], ["finetune", "a/model", "--data", "x"],
]  # fmt: skip


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("command", RUNS, ids=lambda command: command[0])
def test_a_signal_during_the_imports_ends_with_status_130(command, name):
    code = INTERRUPTED_IMPORT.replace("{name}", name)
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=SOURCE, timeout=120
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.endswith("Interrupted before there was any result.\n")


def test_a_closed_stderr_is_no_error():
    code = "import sys; sys.stderr = None; from goldsmith.cli.terminal import announce; announce('Loading')"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, timeout=120).returncode == 0
