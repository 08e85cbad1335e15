"""`goldsmith new`: the files pass as written, nothing is overwritten, and the output says what to run next."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import goldsmith
from goldsmith.cli import app

pytestmark = pytest.mark.sweep(5)

SOURCE = str(Path(goldsmith.__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.sweep(5, part=3)),
        pytest.param(["--torch"], marks=pytest.mark.sweep(5, part=1)),
    ],
)
def test_the_commands_that_it_names_pass(options):
    written = run("new", "my_norm", *options, "--json")
    assert written.exit_code == 0, written.output
    content = json.loads(written.stdout)
    assert content["files"] == ["my_norm.py", "test_my_norm.py"]
    assert ("triton" in Path("my_norm.py").read_text()) == (not options)
    verify, test, diagnose = (command.split() for command in content["next"])
    assert verify[:2] == ["goldsmith", "verify"] and diagnose[:2] == ["goldsmith", "diagnose"]
    result = run(*verify[1:], "--jobs", "1")
    assert result.exit_code == 0 and "6/6" in result.stdout, result.output
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, *test[1:], "-q"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


def test_the_output_says_what_was_written_and_what_to_run_next():
    output = run("new", "kernels/my_norm").stdout
    assert "Wrote kernels/my_norm.py " in output and "Wrote kernels/test_my_norm.py " in output
    assert (
        output.index("Next:") < output.index("goldsmith verify kernels/my_norm.py") < output.index("python -m pytest")
    )


@pytest.mark.parametrize("existing", ["my_norm.py", "test_my_norm.py"])
def test_an_existing_file_is_kept(existing):
    Path(existing).write_text("mine")
    result = run("new", "my_norm")
    assert result.exit_code == 2 and f"{existing} exists already" in result.stderr
    assert [path.name for path in Path.cwd().iterdir()] == [existing] and Path(existing).read_text() == "mine"


@pytest.mark.parametrize(
    "name, message",
    [
        ("my-norm", "'my-norm' cannot be imported; choose a Python name"),
        ("class", "cannot be imported"),
        ("torch", "torch.py would hide the installed module torch"),
        ("random", "random.py would hide the installed module random"),
    ],
)
def test_a_name_that_python_cannot_use_is_refused(name, message):
    result = run("new", name)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("lost", ["my_norm.py", "test_my_norm.py"])
def test_a_full_disk_leaves_neither_file(lost, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opening(path, mode, **options):
        path.touch()
        return Full() if path.name == lost else open(path, mode.replace("x", "w"), **options)

    monkeypatch.setattr("goldsmith.cli.new.command.open", opening, raising=False)
    result = run("new", "my_norm")
    assert result.exit_code == 2 and "No space left on device" in result.stderr
    assert not list(Path.cwd().iterdir())
