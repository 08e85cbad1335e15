"""Creates .venv, installs goldsmith into it and builds the native library, where anything has changed.

setup.sh calls it with a Python that it has checked. Needs only the standard library.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native

# What an installation depends on: the checkout's place (an editable install points to it) and these files' text.
SOURCES = ("pyproject.toml", "constraints.txt", "scripts/setup.py")
VERSION = "src/goldsmith/__init__.py"
PYTHON = Path(".venv/bin/python")
# The finder of an editable install. Python imports it at every start, and pytest warns about each module of a plugin's
# distribution that is imported before pytest, unless its docstring has this word.
FINDER = "lib/python*/site-packages/_editable_skbc_goldsmith.py"
SILENCE = '"""PYTEST_DONT_REWRITE"""\n'
STAMP = Path(".venv/.installed")


def fingerprint() -> str:
    text = os.getcwd() + "\n"
    text += "\n".join(Path(name).read_text() for name in SOURCES)
    text += "\n".join(line for line in Path(VERSION).read_text().splitlines() if line.startswith("__version__"))
    return hashlib.sha256(text.encode()).hexdigest() + "\n"


def runs(python: Path, what: str = "pass") -> bool:
    try:
        return subprocess.run([python, "-c", what], capture_output=True).returncode == 0
    except OSError:
        return False


def pip(*arguments: str) -> None:
    # relative, because pip splits this variable at spaces; as a variable it reaches build environments as well
    environment = os.environ | {"PIP_CONSTRAINT": "constraints.txt", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([PYTHON, "-m", "pip", "install", *arguments], env=environment)
    if done.returncode:
        sys.exit(
            "\ngoldsmith: pip could not install what is needed; its lines above say why. Most often the package index "
            "cannot be reached or the disk is full (about 2 GB are needed). Nothing is lost: put it right and run make "
            "again, and it goes on from here.\n"
        )


def prepare() -> None:
    if not runs(PYTHON, "import pip"):  # none, one that was interrupted, or one whose Python is gone
        print(f"goldsmith: creating .venv with Python {sys.version.split()[0]}", flush=True)
        venv.create(".venv", clear=True, with_pip=True)
    print(
        "goldsmith: installing into .venv (downloads torch and compiles the native library; later runs skip this)",
        flush=True,
    )
    pip("scikit-build-core", "cmake", "ninja")


def silence_finder(environment: Path) -> None:
    """Keep pytest from warning about the editable install in every run of a user's tests."""
    for path in environment.glob(FINDER):
        text = path.read_text()
        if not text.startswith(SILENCE):
            new = path.with_suffix(".new")
            new.write_text(SILENCE + text)
            os.replace(new, path)


def main() -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    with open(".setup.lock", "w") as lock, ThreadPoolExecutor(1) as beside:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two makes at once, the second waits and finds the work done
        print_, library = fingerprint(), None
        missing = not (STAMP.exists() and STAMP.read_text() == print_ and runs(PYTHON))
        if missing:
            prepare()
        if native.supported() and not native.fresh():
            print("goldsmith: building the native library (a minute; later runs build what has changed)", flush=True)
            library = beside.submit(native.build)  # pip uses one processor and the network
        if missing:
            # Python writes the byte code of what it imports; pip would write that of 20,000 files, most never imported
            late = [] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]
            pip(*late, "--no-build-isolation", "--editable", ".[dev,hf,train,serve,docs,cluster]")
            silence_finder(Path(".venv"))
            STAMP.write_text(print_)
        if library is not None:
            library.result()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except native.Failed as error:
        sys.exit(f"\ngoldsmith: {error}\n")
    except KeyboardInterrupt:
        print("\ngoldsmith: interrupted; run make again, and it continues from here.\n", file=sys.stderr)
        sys.exit(130)
