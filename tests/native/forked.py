"""Runs scripts of cases/ one after the other, each in a fork of this process, which imports torch only once: under a
sanitizer the import takes seconds.

    python forked.py FOLDER SCRIPT [SCRIPT:ARGUMENT ...]

Writes the output and exit status of each script to FOLDER.
"""

import os
import runpy
import sys
from pathlib import Path

import goldsmith.experts
import goldsmith.offload.lanes.cpu_lane  # noqa: F401

CASES = Path(__file__).with_name("cases")


def main(folder: Path, *names: str) -> None:
    for name in names:
        child = os.fork()
        if child == 0:
            become(folder, name)
            return  # to the interpreter's normal exit, where sanitizers report
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{name}.status").write_text(str(status))


def become(folder: Path, name: str) -> None:
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{end}", os.O_WRONLY | os.O_CREAT), number)
    case, _, argument = name.partition(":")
    script = str(CASES / f"{case}.py")
    sys.argv = [script, *filter(None, [argument])]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
