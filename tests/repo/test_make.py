"""The Makefile on machines that lack something, and on its second run. Nothing here installs anything."""

import importlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from repo.tree import ROOT, files, shown

LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
READ = (
    *(
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "src/goldsmith/__init__.py",
        "CMakeLists.txt",
        "csrc/goldsmith.h",
    ),
    *("scripts/setup.sh", "scripts/setup.py", "scripts/native.py", "scripts/backend.py"),
)
# What a shell script may count on everywhere.
ALWAYS = ("sh", "make", "dirname", "mkdir")
# A Python that answers as the version given; whatever else it is asked to do is the test's affair.
OLD_PYTHON = """#!/bin/sh
case "$2" in
    *python_version*) echo 3.9.18 ;;
    *version_info*) exit 1 ;;
esac
"""
BARE_PYTHON = """#!/bin/sh
case "$2" in
    *python_version*) echo 3.12.1 ;;
    *ensurepip*) exit 1 ;;
esac
"""
# Stands in for .venv/bin/python: notes what it is asked to install.
NOTING_PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo "$@" "constraint=$PIP_CONSTRAINT" >> installed.txt
"""
# Stands in for cmake: notes that it builds, and installs a library into the prefix that it is given.
NOTING_CMAKE = """#!/bin/sh
case "$1" in
    -S) mkdir -p "$4" ;;
    --build) echo built >> built.txt ;;
    --install) mkdir -p "$4/goldsmith/lib" && : > "$4/goldsmith/lib/libgoldsmith.so" ;;
esac
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def checkout(tmp_path):
    """The files that `make setup` reads, in a folder with spaces in its name, and a cmake that only notes its calls."""
    folder = tmp_path / "a check out"
    for name in READ:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    script(folder / ".venv/bin/cmake", NOTING_CMAKE)
    return folder


@pytest.fixture
def machine(tmp_path):
    """A folder to be the whole PATH: the tools named, and the scripts given."""

    def build(*tools, **scripts):
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in (*ALWAYS, *tools):
            (folder / tool).symlink_to(shutil.which(tool))
        for name, text in scripts.items():
            script(folder / name, text)
        return folder

    return build


def make(checkout, path, *arguments):
    environment = {"PATH": str(path), "HOME": str(checkout)}
    command = [shutil.which("make"), "-C", str(checkout), *(arguments or ["setup"])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def error_lines(done):
    """The message: the one paragraph before make's own last line."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("goldsmith: ")]


def test_a_machine_without_git_is_told_what_to_install(checkout, machine):
    (line,) = error_lines(make(checkout, machine("g++")))
    assert line.startswith("goldsmith: git is missing. Install it (Debian, Ubuntu: apt-get install git")


def test_a_machine_without_a_compiler_is_told_what_to_install(checkout, machine):
    (line,) = error_lines(make(checkout, machine("git")))
    assert line.startswith("goldsmith: g++ is missing.")


def test_a_machine_without_python_is_told_what_to_install(checkout, machine):
    (line,) = error_lines(make(checkout, machine("git", "g++")))
    assert line.startswith("goldsmith: Python is missing. Install Python 3.11 or newer")


def test_an_old_python_is_named_with_its_version(checkout, machine):
    (line,) = error_lines(make(checkout, machine("git", "g++", python3=OLD_PYTHON)))
    assert line.startswith("goldsmith: Python 3.11 or newer is needed; found only python3 (3.9.18).")


def test_a_python_without_venv_is_told_what_to_install(checkout, machine):
    (line,) = error_lines(make(checkout, machine("git", "g++", python3=BARE_PYTHON)))
    assert line.startswith("goldsmith: python3 (3.12.1) has no working venv module.")


def test_the_first_python_that_will_do_is_taken(checkout, machine):
    script = '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho taken "$0" "$@"\n'
    path = machine("git", "g++", python3=OLD_PYTHON, **{"python3.11": BARE_PYTHON, "python3.12": script})
    done = make(checkout, path)
    assert "python3.12 scripts/setup.py" in done.stdout


def test_the_report_goes_to_the_checkout_from_wherever_make_is_called(checkout, machine):
    fingerprint = [sys.executable, "-c", "import setup; print(setup.fingerprint(), end='')"]
    stamp = subprocess.run(
        fingerprint, env={"PYTHONPATH": str(checkout / "scripts")}, cwd=checkout, capture_output=True
    )
    script(checkout / ".venv/bin/python", NOTING_PYTHON)
    script(checkout / ".venv/bin/goldsmith", '#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done\n')
    (checkout / ".venv/.installed").write_bytes(stamp.stdout)
    done = make(checkout, machine("git", "g++", python3=f'#!/bin/sh\nexec {sys.executable} "$@"\n'), "verify")
    assert done.returncode == 0, done.stderr
    assert f"<{checkout}/build/verify.html>" in done.stdout
    # what to do next is a line that a shell runs, wherever it stands
    (activation,) = (line.strip() for line in done.stdout.splitlines() if "bin/activate" in line)
    assert activation == f". '{checkout}/.venv/bin/activate'"
    assert done.stdout.index("<verify>") < done.stdout.index(activation) < done.stdout.index("goldsmith doctor")
    assert (checkout / "build").is_dir()


def set_up(checkout):
    command = [sys.executable, str(checkout / "scripts/setup.py")]

    def as_in_a_terminal():  # a runner in the background ignores Ctrl-C, and so would its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.run(command, capture_output=True, text=True, cwd="/", preexec_fn=as_in_a_terminal)


def installations(checkout):
    noted = checkout / "installed.txt"
    return noted.read_text().splitlines() if noted.exists() else []


def builds(checkout):
    noted = checkout / "built.txt"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def test_setting_up_installs_once_and_again_only_when_something_changed(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON)
    assert set_up(checkout).returncode == 0
    first = installations(checkout)
    assert len(first) == 2
    extras = "dev,hf,train,serve,docs,cluster"
    options = "--no-compile --no-build-isolation --editable"
    assert first[1] == f"-m pip install {options} .[{extras}] constraint=constraints.txt"
    done = set_up(checkout)
    assert (done.stdout, installations(checkout)) == ("", first)
    os.utime(checkout / "pyproject.toml")  # a fresh date alone is no change
    set_up(checkout)
    assert installations(checkout) == first
    with open(checkout / "constraints.txt", "a") as text:
        text.write("\n# changed\n")
    set_up(checkout)
    assert installations(checkout) == first * 2


def test_a_checkout_that_was_moved_installs_again(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON)
    set_up(checkout)
    moved = checkout.rename(checkout.parent / "elsewhere")
    set_up(moved)
    assert (len(installations(moved)), builds(moved)) == (4, 2)


@pytest.mark.skipif(not LINUX_X86, reason="the native library is for Linux on x86-64")
def test_the_native_library_is_built_again_only_when_its_sources_have_changed(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON)
    header, library = checkout / "csrc/goldsmith.h", checkout / "src/goldsmith/lib/libgoldsmith.so"
    assert "building the native library" in set_up(checkout).stdout
    os.utime(header)  # a fresh date alone is no change
    assert (set_up(checkout).stdout, builds(checkout)) == ("", 1)
    header.write_text(header.read_text() + "// changed\n")
    os.utime(header, (1, 1))  # and an old one does not hide one
    set_up(checkout)
    assert (builds(checkout), header.stat().st_mtime > 1) == (2, True)
    library.unlink()
    set_up(checkout)
    assert (builds(checkout), library.exists(), len(installations(checkout))) == (3, True, 2)


# Stands in for the build backend's part of `pip install --editable`: the library is built only after it has ended.
INSTALLING = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
import backend
backend._build_editable = lambda *_: Path("editable").touch()
backend.build_editable(".")
"""
WAITING_CMAKE = NOTING_CMAKE.replace(
    "echo built", "n=0; until [ -e editable ]; do sleep 0.1; n=$((n+1)); [ $n = 100 ] && exit 1; done; echo built"
)


@pytest.mark.skipif(not LINUX_X86, reason="the native library is for Linux on x86-64")
def test_pip_installs_while_the_library_is_built(checkout):
    script(checkout / "installing.py", INSTALLING)
    editable = f'case "$*" in *--editable*) sleep 1; exec "{sys.executable}" installing.py ;; esac\n'
    script(checkout / ".venv/bin/python", NOTING_PYTHON + editable)
    script(checkout / ".venv/bin/cmake", WAITING_CMAKE)
    done = set_up(checkout)
    assert (done.returncode, builds(checkout)) == (0, 1), done.stderr


@pytest.mark.skipif(not LINUX_X86, reason="the native library is for Linux on x86-64")
def test_a_library_that_cannot_be_built_says_so_in_a_paragraph_and_is_tried_again(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON)
    script(
        checkout / ".venv/bin/cmake",
        NOTING_CMAKE + "if [ $1 = --build ]; then echo error: no such word >&2; exit 1; fi\n",
    )
    for attempt in (1, 2):
        done = set_up(checkout)
        assert (done.returncode, builds(checkout)) == (1, attempt)
        assert "error: no such word" in done.stderr
        assert done.stderr.strip().endswith(
            "goldsmith: the native library could not be built; the lines above say why. It needs g++ 11 or newer. "
            "Put it right and run make again."
        )
    assert len(installations(checkout)) == 2


def test_two_makes_at_once_install_once(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON.replace("echo", "sleep 0.3; echo"))
    with ThreadPoolExecutor(3) as pool:
        assert {done.returncode for done in pool.map(set_up, [checkout] * 3)} == {0}
    assert len(installations(checkout)) == 2


def test_an_installation_that_fails_says_so_in_a_paragraph_and_is_tried_again(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON + "exit 1\n")
    for attempt in (1, 2):
        done = set_up(checkout)
        assert done.returncode == 1
        assert done.stderr.strip().startswith("goldsmith: pip could not install what is needed")
        assert len(installations(checkout)) == attempt


def test_an_interrupted_installation_says_so_in_a_sentence(checkout):
    script(checkout / ".venv/bin/python", NOTING_PYTHON + "kill -INT $PPID; sleep 0.2\n")
    done = set_up(checkout)
    assert (done.returncode, done.stderr.strip()) == (
        130,
        "goldsmith: interrupted; run make again, and it continues from here.",
    )


def test_pytest_does_not_warn_about_the_editable_install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    setup = importlib.import_module("setup")
    finder = tmp_path / "lib/python3.11/site-packages/_editable_skbc_goldsmith.py"
    finder.parent.mkdir(parents=True)
    finder.write_text("from __future__ import annotations\n")
    setup.silence_finder(tmp_path)
    setup.silence_finder(tmp_path)
    assert finder.read_text().count("PYTEST_DONT_REWRITE") == 1
    compile(finder.read_text(), str(finder), "exec")
    setup.silence_finder(Path(sys.prefix))  # as `make` does after an installation
    (tmp_path / "test_a.py").write_text("def test_a(assay): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error::pytest.PytestAssertRewriteWarning", "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout and "warning" not in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_a_fresh_clone_sets_itself_up_and_the_second_time_does_nothing(tmp_path):
    clone = tmp_path / "a fresh clone"
    for path in files():
        (clone / shown(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, clone / shown(path))
    command = [shutil.which("make"), "--no-print-directory", "-C", str(clone), "setup"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert first.returncode == 0, first.stdout + first.stderr
    doctor_command = [clone / ".venv/bin/goldsmith", "doctor", "--json"]
    doctor = subprocess.run(doctor_command, env=environment, capture_output=True, text=True, cwd="/")
    assert doctor.returncode == 0, doctor.stderr
    second = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
