"""A process that starts with torch imported is like any other: arguments, folder, streams, signals, exit status."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_processes")
PROGRAM = """
import os, sys
print("torch" in sys.modules, __name__, sys.argv, os.getcwd(), sys.path[0], os.getppid(), os.environ.get("WARM"))
print(sys.stdin.read(), file=sys.stderr)
raise SystemExit(len(sys.argv))
"""


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def test_a_program_gets_its_arguments_folder_environment_and_streams_and_is_a_child_of_the_test(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(PROGRAM)
    for first, argv0, path in (
        (["-c", PROGRAM], "-c", ""), (["-m", "own"], str(script), tmp_path), ([str(script)], str(script), tmp_path),
    ):  # fmt: skip
        done = python(*first, "word", cwd=tmp_path, env=os.environ | {"WARM": "é"}, input="typed")
        said = f"True __main__ {[argv0, 'word']} {tmp_path} {path} {os.getpid()} é\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, said, "typed\n")


def test_a_traceback_has_the_frames_of_the_program_alone():
    warm = python("-c", "1 / 0")
    cold = python("-X", "utf8", "-c", "1 / 0")  # an option of Python's: it gets its own
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr)


def test_signals_and_aborts_are_its_own():
    assert python("-c", "import os; os.abort()").returncode == -signal.SIGABRT
    assert python("-c", "import os; os.kill(os.getpid(), 2); import time; time.sleep(9)").returncode == -signal.SIGINT
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True) as process:
        os.kill(process.pid, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("changed", [{"OMP_NUM_THREADS": "7"}, {"PYTHONHASHSEED": "3"}])
def test_an_environment_that_counts_at_the_start_gets_a_python_of_its_own(changed):
    done = python("-c", "import sys; print('torch' in sys.modules)", env=os.environ | changed)
    assert done.stdout == "False\n"


def test_commands_of_a_shell_start_there_too(warm_processes, tmp_path):
    environment = os.environ | {"PATH": warm_processes.commands() + os.pathsep + os.environ["PATH"]}
    line = "python -c 'import sys; print(\"torch\" in sys.modules); sys.exit(3)'; echo $?; goldsmith --version; "
    line += "echo 'print(5)' | python; python -c 'import os; os.abort()' 2>/dev/null"
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["True", "3"] and lines[2].startswith("goldsmith ") and lines[3:] == ["5"]
    assert done.returncode in (-signal.SIGABRT, 128 + signal.SIGABRT)
