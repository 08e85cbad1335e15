"""Stands before the compiler where the wheel is built: what the checkout has compiled already is not compiled again.

    python tests/repo/compiled.py g++ ARGUMENTS

The object of build/native is taken when the command is the same but for the place, and every file of ours that the
preprocessor opens holds what it was made from: a header that the sdist lacks, or another flag, is seen as by the
compiler. Whatever is not there is compiled without optimisation: how fast this wheel is nobody asks.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build/native"


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments[:-1] else ""


def plain(arguments: list[str], root: Path) -> list[str]:
    """A command without its place and the options for dependency files; c++ is the compiler that it links to."""
    kept = [os.path.realpath(arguments[0]), *(word for word in arguments[1:] if word != "-MD")]
    for name in ("-MT", "-MF"):
        if name in kept:
            del kept[kept.index(name) : kept.index(name) + 2]
    return [word.replace(str(root), "") for word in kept]


def opened(command: list[str], object_: str, dependencies: str) -> list[Path]:
    """The files that the preprocessor opens; ninja reads the same list."""
    only = [word for word in command if word not in ("-c", "-MD")]
    for name in ("-o", "-MT", "-MF"):
        if name in only:
            del only[only.index(name) : only.index(name) + 2]
    subprocess.run([*only, "-M", "-MT", object_, "-MF", dependencies], check=True)
    text = Path(dependencies).read_text().partition(":")[2].replace("\\\n", " ")
    return [Path(word) for word in shlex.split(text)]


def known(command: list[str]) -> Path | None:
    """The object that this command would make, if the checkout has it."""
    source, object_, dependencies = Path(command[-1]), option(command, "-o"), option(command, "-MF")
    root = next((folder for folder in source.parents if (folder / "CMakeLists.txt").exists()), None)
    if "-c" not in command or not dependencies or root is None:
        return None
    try:
        entries = json.loads((BUILT / "compile_commands.json").read_text())
        contents = json.loads((BUILT / "sources.json").read_text())
    except OSError:
        return None
    for entry in entries:
        before = shlex.split(entry["command"])
        if Path(entry["file"]) == ROOT / source.relative_to(root) and plain(before, ROOT) == plain(command, root):
            ours = [p.resolve() for p in opened(command, object_, dependencies) if root in p.resolve().parents]
            now = {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in ours}
            return BUILT / object_ if now.items() <= contents.items() else None
    return None


def main(*command: str) -> int:
    result = known(list(command))
    if result is None:
        print(f"compiled.py: the checkout has no such object: {shlex.join(command)}")
        return subprocess.run([*command, "-O0"]).returncode
    shutil.copyfile(result, option(list(command), "-o"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
